//! The SQL of a file that is applied. One transaction; another one that applies a file waits for it.

use super::diff::{CONNECTION_WORDS, Step, Stored, StoredAccount, StoredLink};
use crate::directory::{self, DirectoryError, NewAccount, NewLink};
use crate::writer::states::live_states;
use reconcile::LinkRules;
use schemas::{AccountId, LinkId};
use sqlx::types::Json;
use sqlx::{PgConnection, Row};
use std::collections::BTreeMap;

/// Everything that a file is compared with.
pub(super) async fn read(db: &mut PgConnection) -> Result<Stored, DirectoryError> {
    sqlx::query("select pg_advisory_xact_lock(hashtext('lockstep_apply'))")
        .execute(&mut *db)
        .await?;
    let open = open_copies(db).await?;
    let rows = directory::list_accounts(db).await?;
    let names: BTreeMap<AccountId, String> =
        rows.iter().map(|row| (row.id, row.name.clone())).collect();
    let states = link_states(db).await?;
    let mut links = Vec::new();
    for follower in rows.iter().map(|row| row.id) {
        for rules in directory::load_links(db, follower).await? {
            let name = |id: AccountId| names.get(&id).cloned().unwrap_or_default();
            let (enabled, is_removed) = states.get(&rules.link).copied().unwrap_or((false, true));
            links.push(StoredLink {
                id: rules.link,
                master: name(rules.master),
                follower: name(rules.follower),
                copies_open: open.get(&rules.link).copied().unwrap_or(0),
                is_removed,
                link: link_of(rules, enabled),
            });
        }
    }
    links.sort_by_key(|link| link.id);
    let copies_of = |id: AccountId| {
        let touches = |l: &&StoredLink| l.link.master == id || l.link.follower == id;
        links.iter().filter(touches).map(|link| link.copies_open).sum()
    };
    let accounts = rows.into_iter().map(|row| StoredAccount {
        id: row.id,
        is_owned: row.node.is_some(),
        copies_open: copies_of(row.id),
        account: NewAccount {
            name: row.name,
            platform: row.platform,
            connection: row.connection,
            enabled: row.enabled,
        },
    });
    Ok(Stored { accounts: accounts.collect(), links })
}

async fn open_copies(db: &mut PgConnection) -> Result<BTreeMap<LinkId, i64>, DirectoryError> {
    let rows = sqlx::query(concat!(
        "select link_id, count(*) as open from pairs where state in ",
        live_states!(),
        " group by link_id",
    ));
    let rows = rows.fetch_all(db).await?;
    let open = rows
        .iter()
        .filter_map(|row| Some((LinkId::from_i64(row.get("link_id")).ok()?, row.get("open"))));
    Ok(open.collect())
}

/// Whether each link is on, and whether it was removed.
async fn link_states(
    db: &mut PgConnection,
) -> Result<BTreeMap<LinkId, (bool, bool)>, DirectoryError> {
    let rows = sqlx::query("select id, enabled, deleted_at is not null as removed from copy_links");
    let rows = rows.fetch_all(db).await?;
    let states = rows.iter().filter_map(|row| {
        Some((LinkId::from_i64(row.get("id")).ok()?, (row.get("enabled"), row.get("removed"))))
    });
    Ok(states.collect())
}

fn link_of(rules: LinkRules, enabled: bool) -> NewLink {
    NewLink {
        master: rules.master,
        follower: rules.follower,
        magic: Some(rules.magic),
        enabled,
        sizing: rules.sizing,
        below_min: rules.below_min,
        above_max: rules.above_max,
        align_contract: rules.align_contract,
        slippage_points: rules.slippage_points,
        copy_stops: rules.copy_stops,
        copy_pendings: rules.copy_pendings,
        reverse: rules.reverse,
        sync_existing: rules.sync_existing,
        symbol_map: rules.symbol_map,
        symbol_suffix: rules.symbol_suffix,
    }
}

/// Makes one change. False where the row is not any more what the change was made for.
pub(super) async fn make(db: &mut PgConnection, step: &Step) -> Result<bool, DirectoryError> {
    match step {
        Step::AddAccount(new) => directory::add_account(db, new).await.map(|_| true),
        Step::ChangeAccount { id, to } => change_account(db, *id, to).await,
        Step::SwitchAccountOff { id } => {
            directory::enable_account(db, *id, false).await.map(|_| true)
        }
        Step::AddLink { master, follower, link } => {
            let master = directory::account_id(db, master).await?;
            let follower = directory::account_id(db, follower).await?;
            let new = NewLink { master, follower, ..link.clone() };
            directory::add_link(db, &new).await.map(|_| true)
        }
        Step::ChangeLink { id, to } => change_link(db, *id, to).await,
        Step::RemoveLink { id } => remove_link(db, *id).await,
    }
}

/// What it is at its broker changes only where nobody can have a session of it.
async fn change_account(
    db: &mut PgConnection,
    id: AccountId,
    to: &NewAccount,
) -> Result<bool, DirectoryError> {
    let words: Vec<String> = CONNECTION_WORDS.iter().map(|word| (*word).to_owned()).collect();
    let changed = sqlx::query(
        "update trading_accounts set platform = $2, connection = (connection - $4) || $3 \
         where id = $1 and (platform <> $2 or connection <> (connection - $4) || $3) \
         and not enabled and node_id is null",
    )
    .bind(id.as_i64())
    .bind(&to.platform)
    .bind(&to.connection)
    .bind(&words)
    .execute(&mut *db)
    .await?
    .rows_affected()
        > 0;
    let differs: bool = sqlx::query_scalar(
        "select platform <> $2 or connection <> (connection - $4) || $3 \
         from trading_accounts where id = $1",
    )
    .bind(id.as_i64())
    .bind(&to.platform)
    .bind(&to.connection)
    .bind(&words)
    .fetch_one(&mut *db)
    .await?;
    let switched = directory::enable_account(db, id, to.enabled).await?;
    Ok(!differs && (changed || switched))
}

async fn change_link(
    db: &mut PgConnection,
    id: LinkId,
    to: &NewLink,
) -> Result<bool, DirectoryError> {
    let (sizing, value) = directory::sizing_columns(&to.sizing);
    let changed = sqlx::query(concat!(
        "update copy_links set magic = coalesce($2, magic), sizing = $3, sizing_value = $4, \
         below_min = $5, above_max = $6, align_contract = $7, slippage_points = $8, copy_stops = $9, \
         copy_pendings = $10, reverse = $11, sync_existing = $12, symbol_map = $13, symbol_suffix = $14 \
         where id = $1 and deleted_at is null and (magic = coalesce($2, magic) or not enabled and not exists \
         (select 1 from pairs where link_id = $1 and state in ",
        live_states!(),
        "))",
    ))
    .bind(id.as_i64())
    .bind(to.magic.map(|magic| magic.get() as i32))
    .bind(sizing)
    .bind(value)
    .bind(to.below_min_word())
    .bind(to.above_max_word())
    .bind(to.align_contract)
    .bind(i32::try_from(to.slippage_points).unwrap_or(i32::MAX))
    .bind(to.copy_stops)
    .bind(to.copy_pendings)
    .bind(to.reverse)
    .bind(to.sync_existing)
    .bind(Json(&to.symbol_map))
    .bind(&to.symbol_suffix)
    .execute(&mut *db)
    .await?;
    if changed.rows_affected() == 0 {
        return Ok(false);
    }
    let is_on: bool = sqlx::query_scalar("select enabled from copy_links where id = $1")
        .bind(id.as_i64())
        .fetch_one(&mut *db)
        .await?;
    // Switching on looks anew whether the broker keeps tags; a link that is on stays as it is.
    if is_on != to.enabled {
        directory::enable_link(db, id, to.enabled).await?;
    }
    Ok(true)
}

/// Marked, never deleted: its copies are followed to their end, and its magic stays its own.
async fn remove_link(db: &mut PgConnection, id: LinkId) -> Result<bool, DirectoryError> {
    let removed = sqlx::query(
        "update copy_links set deleted_at = clock_timestamp() where id = $1 and deleted_at is null",
    );
    Ok(removed.bind(id.as_i64()).execute(db).await?.rows_affected() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database;
    use reconcile::Sizing;
    use rust_decimal::Decimal;
    use schemas::Magic;
    use serde_json::json;

    fn account(name: &str, port: u16) -> NewAccount {
        let connection = json!({ "address": format!("127.0.0.1:{port}") });
        NewAccount {
            name: name.to_owned(),
            platform: "paper".to_owned(),
            connection,
            enabled: false,
        }
    }

    async fn database() -> PgConnection {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database("apply").await.unwrap();
        database::connect_migrated(&url, "test").await.unwrap()
    }

    // The file was compared with a row that nobody owned.
    #[tokio::test]
    async fn an_account_that_somebody_may_have_a_session_of_by_now_keeps_its_place_at_its_broker() {
        let mut db = database().await;
        let id = directory::add_account(&mut db, &account("one", 1)).await.unwrap();
        let change = Step::ChangeAccount { id, to: account("one", 2) };
        for (held, made) in [
            ("update trading_accounts set enabled = true", false),
            (
                "update trading_accounts set enabled = false, node_id = 'n', lease_until = now()",
                false,
            ),
            ("update trading_accounts set node_id = null", true),
        ] {
            sqlx::raw_sql(held).execute(&mut db).await.unwrap();
            assert_eq!(make(&mut db, &change).await.unwrap(), made, "{held}");
            let rows = directory::list_accounts(&mut db).await.unwrap();
            let port = if made { 2 } else { 1 };
            assert_eq!(rows[0].connection, account("one", port).connection, "{held}");
        }
    }

    // Its open copies would be nobody's any more.
    #[tokio::test]
    async fn a_link_that_may_have_open_copies_by_now_keeps_its_magic() {
        let mut db = database().await;
        let mut ids = Vec::new();
        for (name, port) in [("boss", 1), ("one", 2)] {
            ids.push(directory::add_account(&mut db, &account(name, port)).await.unwrap());
        }
        let plain = NewLink::plain(ids[0], ids[1], Sizing::Multiplier(Decimal::ONE));
        let of_magic =
            |magic| NewLink { magic: Magic::new(magic).ok(), enabled: false, ..plain.clone() };
        let id = directory::add_link(&mut db, &of_magic(5)).await.unwrap();
        let change = Step::ChangeLink { id, to: of_magic(6) };
        let row = "insert into pairs (id, link_id, follower_id, master_ticket, follower_ticket, state, \
             symbol, side, master_side, master_lots_at_open, version, lease_token, node_id) \
             select gen_random_uuid(), id, follower_id, 1, 1, 'open', 'EURUSD', 'buy', 'buy', 1, 0, 0, 'n' \
             from copy_links";
        for (held, made) in [
            ("update copy_links set enabled = true", false),
            (row, false),
            ("update pairs set state = 'closed', closed_at = now()", true),
        ] {
            sqlx::raw_sql(held).execute(&mut db).await.unwrap();
            if held == row {
                directory::enable_link(&mut db, id, false).await.unwrap();
            }
            assert_eq!(make(&mut db, &change).await.unwrap(), made, "{held}");
            let magic = directory::list_links(&mut db).await.unwrap()[0].magic;
            assert_eq!(magic.get(), if made { 6 } else { 5 }, "{held}");
        }
        make(&mut db, &Step::RemoveLink { id }).await.unwrap();
        assert!(!make(&mut db, &change).await.unwrap(), "it is removed");
    }
}
