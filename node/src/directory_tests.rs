use super::*;
use crate::database;
use std::time::Duration;

/// A test that waits for longer than this has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// A database with one link from a master to a follower, and its URL.
struct Linked {
    url: String,
    db: PgConnection,
    master: AccountId,
    follower: AccountId,
    link: LinkId,
}

/// A new database with enabled accounts of these names and platforms: its URL, and the accounts in their
/// order.
pub(crate) async fn database_with(
    name: &str,
    accounts: &[(&str, &str)],
) -> (String, PgConnection, Vec<AccountId>) {
    let server = devstack::shared_postgres().await.unwrap();
    let url = server.create_database(name).await.unwrap();
    let mut db = database::connect_migrated(&url, "test").await.unwrap();
    let mut ids = Vec::new();
    for (name, platform) in accounts {
        let (name, platform) = ((*name).to_owned(), (*platform).to_owned());
        let connection = serde_json::json!({});
        let new = NewAccount { name, platform, connection, enabled: true };
        ids.push(add_account(&mut db, &new).await.unwrap());
    }
    (url, db, ids)
}

async fn linked() -> Linked {
    let accounts = [("master", "paper"), ("follower", "paper")];
    let (url, mut db, accounts) = database_with("directory", &accounts).await;
    let plain = NewLink::plain(accounts[0], accounts[1], Sizing::Multiplier(Decimal::ONE));
    let link = add_link(&mut db, &plain).await.unwrap();
    Linked { url, db, master: accounts[0], follower: accounts[1], link }
}

impl Linked {
    /// What is allowed on the link: as lists show it, which is what its session goes by.
    async fn effective(&mut self) -> Mode {
        let shown = list_links(&mut self.db).await.unwrap()[0].effective_mode;
        let rules = load_links(&mut self.db, self.follower).await.unwrap().remove(0);
        let followed = match (rules.paused, rules.mode) {
            (true, _) => Mode::Paused,
            (false, LinkMode::CloseOnly) => Mode::CloseOnly,
            (false, LinkMode::Copy | LinkMode::CopyUntagged) => Mode::Copy,
        };
        assert_eq!(followed, shown);
        shown
    }
}

#[tokio::test]
async fn the_strictest_of_fleet_master_follower_and_link_counts() {
    let mut w = linked().await;
    assert_eq!(w.effective().await, Mode::Copy);
    for place in 0..4 {
        for mode in [Mode::CloseOnly, Mode::Paused, Mode::Copy] {
            let changed = match place {
                0 => set_fleet_mode(&mut w.db, mode).await,
                1 => set_account_mode(&mut w.db, w.master, mode).await,
                2 => set_account_mode(&mut w.db, w.follower, mode).await,
                _ => set_link_mode(&mut w.db, w.link, mode).await,
            };
            assert!(changed.unwrap());
            assert_eq!(w.effective().await, mode, "place {place}");
        }
    }
    set_fleet_mode(&mut w.db, Mode::CloseOnly).await.unwrap();
    set_link_mode(&mut w.db, w.link, Mode::Paused).await.unwrap();
    assert_eq!(w.effective().await, Mode::Paused);
    assert_eq!(fleet_mode(&mut w.db).await.unwrap(), Mode::CloseOnly);
    assert!(!set_fleet_mode(&mut w.db, Mode::CloseOnly).await.unwrap(), "it was so already");
    let rules = load_links(&mut w.db, w.follower).await.unwrap().remove(0);
    assert!(rules.paused);
    assert_eq!(rules.mode, LinkMode::CloseOnly, "what it does when it is resumed");
    set_link_mode(&mut w.db, w.link, Mode::Copy).await.unwrap();
    set_fleet_mode(&mut w.db, Mode::Copy).await.unwrap();
    let rules = load_links(&mut w.db, w.follower).await.unwrap().remove(0);
    assert_eq!((rules.mode, rules.paused), (LinkMode::Copy, false));
}

#[tokio::test]
async fn a_link_that_is_switched_off_counts_as_close_only_and_may_be_paused() {
    let mut w = linked().await;
    enable_link(&mut w.db, w.link, false).await.unwrap();
    assert_eq!(w.effective().await, Mode::CloseOnly);
    set_link_mode(&mut w.db, w.link, Mode::Paused).await.unwrap();
    assert_eq!(w.effective().await, Mode::Paused);
}

#[tokio::test]
async fn a_link_that_is_deleted_only_closes() {
    let mut w = linked().await;
    sqlx::query("update copy_links set deleted_at = now()").execute(&mut w.db).await.unwrap();
    let rules = load_links(&mut w.db, w.follower).await.unwrap().remove(0);
    assert_eq!((rules.mode, rules.paused), (LinkMode::CloseOnly, false));
}

#[tokio::test]
async fn a_link_that_was_deleted_long_ago_is_read_as_long_as_it_has_a_copy() {
    let mut w = linked().await;
    let count = async |w: &mut Linked| {
        load_session_account(&mut w.db, w.follower).await.unwrap().links.len()
    };
    sqlx::query("update copy_links set deleted_at = now() - interval '29 minutes'")
        .execute(&mut w.db)
        .await
        .unwrap();
    assert_eq!(count(&mut w).await, 1, "a copy without a row may still turn up");
    sqlx::raw_sql(
        "update copy_links set deleted_at = now() - interval '31 minutes';
         insert into pairs (id, link_id, follower_id, master_ticket, follower_ticket, state, symbol, side,
             master_side, master_lots_at_open, version, lease_token, node_id)
         select gen_random_uuid(), id, follower_id, 1, 9, 'open', 'EURUSD', 'buy', 'buy', 1, 1, 1, 'a'
         from copy_links",
    )
    .execute(&mut w.db)
    .await
    .unwrap();
    assert_eq!(count(&mut w).await, 1);
    sqlx::query("update pairs set state = 'closed', closed_at = now()")
        .execute(&mut w.db)
        .await
        .unwrap();
    assert_eq!(count(&mut w).await, 0);
    let all = load_links(&mut w.db, w.follower).await.unwrap();
    assert_eq!(all.len(), 1, "its magic stays its own, and a file that gives it away is told so");
}

#[tokio::test]
async fn a_password_that_was_stored_while_its_key_was_wrapped_anew_stays() {
    let mut w = linked().await;
    let sealed = |n: u8| Sealed {
        key_id: format!("{n:016x}"),
        wrapped_key: vec![n; 60],
        sealed: vec![n; 40],
    };
    store_credential(&mut w.db, w.follower, &sealed(1)).await.unwrap();
    let read = next_wrapped_by_others(&mut w.db, &sealed(3).key_id, None).await.unwrap().unwrap();
    store_credential(&mut w.db, w.follower, &sealed(2)).await.unwrap();
    let rotated = replace_wrapped(&mut w.db, w.follower, &read.wrapped, &sealed(3)).await.unwrap();
    assert!(!rotated);
    assert_eq!(load_credential(&mut w.db, w.follower).await.unwrap(), Some(sealed(2)));
    assert!(replace_wrapped(&mut w.db, w.follower, &sealed(2), &sealed(3)).await.unwrap());
    let rotated = Sealed { sealed: sealed(2).sealed, ..sealed(3) };
    assert_eq!(load_credential(&mut w.db, w.follower).await.unwrap(), Some(rotated));
}

#[tokio::test]
async fn a_mode_moves_no_copy_from_and_switching_on_does() {
    let mut w = linked().await;
    let before = list_links(&mut w.db).await.unwrap()[0].copy_from.clone();
    for mode in [Mode::Paused, Mode::Copy] {
        set_link_mode(&mut w.db, w.link, mode).await.unwrap();
    }
    assert_eq!(list_links(&mut w.db).await.unwrap()[0].copy_from, before);
    enable_link(&mut w.db, w.link, false).await.unwrap();
    enable_link(&mut w.db, w.link, true).await.unwrap();
    assert_ne!(list_links(&mut w.db).await.unwrap()[0].copy_from, before);
}

#[tokio::test]
async fn every_change_of_a_mode_is_announced_and_nothing_else_of_an_account() {
    let mut w = linked().await;
    let mut heard = database::listen(&w.url, "links", "lockstep_links").await.unwrap();
    // A renewal: it must announce nothing, or every cycle of every node would.
    sqlx::query("update trading_accounts set lease_until = now(), lease_token = lease_token + 1")
        .execute(&mut w.db)
        .await
        .unwrap();
    set_account_mode(&mut w.db, w.master, Mode::Copy).await.unwrap();
    set_link_mode(&mut w.db, w.link, Mode::Paused).await.unwrap();
    set_account_mode(&mut w.db, w.master, Mode::CloseOnly).await.unwrap();
    set_fleet_mode(&mut w.db, Mode::Paused).await.unwrap();
    let mut payloads = Vec::new();
    for _ in 0..3 {
        let next = tokio::time::timeout(PATIENCE, heard.recv()).await.expect("an announcement");
        payloads.push(next.unwrap().payload().to_owned());
    }
    let of_link = w.follower.to_string();
    assert_eq!(payloads, [of_link.as_str(), "trading_accounts", "fleet_mode"]);
}

#[tokio::test]
async fn a_fleet_whose_row_is_gone_is_an_error_and_not_copy() {
    let mut w = linked().await;
    sqlx::query("delete from fleet_mode").execute(&mut w.db).await.unwrap();
    let error = load_links(&mut w.db, w.follower).await.unwrap_err().to_string();
    assert!(error.contains("fleet_mode"), "{error}");
    assert!(fleet_mode(&mut w.db).await.is_err());
}

#[tokio::test]
async fn what_is_not_there_has_no_mode() {
    let mut w = linked().await;
    let (account, link) = (AccountId::new(999).unwrap(), LinkId::new(999).unwrap());
    let error = set_account_mode(&mut w.db, account, Mode::Paused).await.unwrap_err();
    assert!(matches!(error, DirectoryError::NoAccount(_)));
    let error = set_link_mode(&mut w.db, link, Mode::Paused).await.unwrap_err();
    assert!(matches!(error, DirectoryError::NoLink(_)));
    assert_eq!(
        "stop".parse::<Mode>().unwrap_err().to_string(),
        "must be copy, close_only or paused, got \"stop\""
    );
}

#[tokio::test]
async fn a_session_is_told_how_many_links_are_held_and_its_masters_names() {
    let mut w = linked().await;
    async fn held(w: &mut Linked) -> (u32, u32) {
        let account = load_session_account(&mut w.db, w.follower).await.unwrap();
        assert_eq!(account.master_names, [(w.master, "master".to_owned())].into());
        (account.held.paused, account.held.close_only)
    }
    assert_eq!(held(&mut w).await, (0, 0));
    set_account_mode(&mut w.db, w.master, Mode::CloseOnly).await.unwrap();
    assert_eq!(held(&mut w).await, (0, 1));
    set_fleet_mode(&mut w.db, Mode::Paused).await.unwrap();
    assert_eq!(held(&mut w).await, (1, 0));
    // Nobody waits for a link that is switched off.
    enable_link(&mut w.db, w.link, false).await.unwrap();
    assert_eq!(held(&mut w).await, (0, 0));
}

#[tokio::test]
async fn a_session_is_told_what_was_said_of_its_account_its_links_and_the_fleet() {
    let mut w = linked().await;
    async fn said(w: &mut Linked) -> (Mode, Vec<Mode>, FleetMode) {
        let account = load_session_account(&mut w.db, w.follower).await.unwrap();
        let links = account.modes.links.values().copied().collect();
        (account.modes.account, links, account.fleet.unwrap())
    }
    let (account, links, fleet) = said(&mut w).await;
    assert_eq!((account, links, fleet.mode), (Mode::Copy, vec![Mode::Copy], Mode::Copy));
    set_account_mode(&mut w.db, w.follower, Mode::CloseOnly).await.unwrap();
    set_account_mode(&mut w.db, w.master, Mode::Paused).await.unwrap();
    set_fleet_mode(&mut w.db, Mode::Paused).await.unwrap();
    let (account, links, later) = said(&mut w).await;
    assert_eq!((account, links, later.mode), (Mode::CloseOnly, vec![Mode::Copy], Mode::Paused));
    assert!(later.changed_at > fleet.changed_at);
    enable_link(&mut w.db, w.link, false).await.unwrap();
    assert_eq!(said(&mut w).await.1, [Mode::CloseOnly]);
    set_link_mode(&mut w.db, w.link, Mode::Paused).await.unwrap();
    assert_eq!(said(&mut w).await.1, [Mode::Paused]);
    // A master leads on; it has nothing to copy.
    sqlx::query("delete from fleet_mode").execute(&mut w.db).await.unwrap();
    let master = load_session_account(&mut w.db, w.master).await.unwrap();
    assert_eq!((master.fleet, master.modes.account), (None, Mode::Paused));
}
