//! Roles of the database with no more rights than their work needs.
//!
//! Decides: nothing; the two scripts beside this file say who may do what.
//! In: a connection of the role that owns the tables. Out: roles `lockstep_node` (what a node
//! needs), `lockstep_api` (what the command line and the API need) and `lockstep_readonly` (what a
//! dashboard may see), with exactly the rights of the list.
//!
//! Invariants:
//! 1. A table that the list does not name is closed to all three.
//! 2. Granting makes no role, and making roles grants nothing: the first needs the owner of the
//!    tables, the second the right to create roles, and many servers do not give both to one.
//! 3. Each script is one transaction, may be run again, and takes back what it does not name.
//!
//! Not covered: who is a member of a role; that is the administrator's.

use sqlx::{AssertSqlSafe, PgConnection};

/// Makes the roles that are missing.
pub const CREATE: &str = include_str!("create.sql");

/// Gives the roles that are there their rights, on the tables that are there.
pub const GRANT: &str = include_str!("grant.sql");

/// The roles.
pub const ROLES: [&str; 3] = ["lockstep_node", "lockstep_api", "lockstep_readonly"];

/// The lines of the list in [`GRANT`], as SQL reads them.
fn list() -> &'static str {
    let rest = GRANT.split_once("from (values").map_or("", |(_, rest)| rest);
    rest.split_once(") as g (").map_or("", |(list, _)| list)
}

/// What one of these roles may do and the role of this connection may not, such as `update of
/// lease_nodes`. Nothing for a member of the role, for the owner of the tables, and for any other role
/// that was given the same. Tables that are not there are passed over.
pub async fn lacking(db: &mut PgConnection, role: &str) -> sqlx::Result<Vec<String>> {
    let list = list();
    let sql = format!(
        "select lacks from (
             select action || ' of ' || g.relation as lacks
             from (values {list}) as g (relation, grantee, actions, columns_only, columns_without)
             cross join unnest(g.actions) as action
             where g.grantee = $1 and to_regclass(g.relation) is not null and case
                 when action = 'delete' then not has_table_privilege(to_regclass(g.relation), action)
                 else exists (
                     select from pg_attribute a
                     where a.attrelid = to_regclass(g.relation) and a.attnum > 0 and not a.attisdropped
                       and (g.columns_only is null or a.attname = any (g.columns_only))
                       and (g.columns_without is null or a.attname <> all (g.columns_without))
                       and not has_column_privilege(a.attrelid, a.attnum, action))
                 end
             union
             select 'execute of ' || f.oid::regprocedure::text
             from (select to_regprocedure('copy_events_make_partitions(integer)') as oid) f
             where $1 = 'lockstep_node' and not has_function_privilege(f.oid, 'execute')
         ) l order by lacks"
    );
    sqlx::query_scalar(AssertSqlSafe(sql)).bind(role).fetch_all(db).await
}

/// Roles that the server does not have.
pub async fn missing(db: &mut PgConnection) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar(
        "select wanted from unnest($1::text[]) wanted
         where not exists (select from pg_roles where rolname = wanted) order by wanted",
    )
    .bind(&ROLES[..])
    .fetch_all(db)
    .await
}

/// Makes the roles that are missing.
///
/// Errors: SQLSTATE 42501 where the role of this connection may not create roles.
pub async fn create(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(CREATE).execute(db).await?;
    Ok(())
}

/// Gives the roles that are there their rights.
///
/// Errors: SQLSTATE 42501 where the role of this connection does not own the tables.
pub async fn grant(db: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql(GRANT).execute(db).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_rights_is_found_whole_in_the_script() {
        let lines: Vec<&str> = list().lines().filter(|line| line.contains("'lockstep_")).collect();
        assert!(lines.first().unwrap().contains("('trading_accounts', 'lockstep_node'"));
        assert!(lines.last().unwrap().contains("('_sqlx_migrations', 'lockstep_readonly'"));
        for role in ROLES {
            assert!(list().contains(role), "{role}");
        }
    }
}
