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

use sqlx::PgConnection;

/// Makes the roles that are missing.
pub const CREATE: &str = include_str!("create.sql");

/// Gives the roles that are there their rights, on the tables that are there.
pub const GRANT: &str = include_str!("grant.sql");

/// The roles.
pub const ROLES: [&str; 3] = ["lockstep_node", "lockstep_api", "lockstep_readonly"];

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
