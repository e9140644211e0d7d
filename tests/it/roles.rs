//! Roles of the database with no more rights than their work needs.

use devstack::shared_postgres;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::{Link, State, assert_clean, differences};
use lockstep_tests::scrape::MetricsPage;
use lockstep_tests::world::{SOON, TAKEOVER, World, run_lockstep, until, url_as};
use paper::protocol::Style;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

/// A login that is a member of one role; logins belong to the whole server, so each test has its own.
async fn add_login(admin: &mut PgConnection, name: &str, role: &str) {
    let sql = format!("create role {name} login in role {role}");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(admin).await.unwrap();
}

/// SQLSTATE of the refusal, if there is one.
async fn refusal(db: &mut PgConnection, sql: &'static str) -> Option<String> {
    let error = sqlx::raw_sql(sql).execute(db).await.err()?;
    let refusal = error.as_database_error().unwrap_or_else(|| panic!("{sql}: {error}"));
    Some(refusal.code().unwrap().into_owned())
}

async fn assert_allowed(db: &mut PgConnection, statements: &[&'static str]) {
    for sql in statements {
        assert_eq!(refusal(db, sql).await, None, "{sql}");
    }
}

async fn assert_denied(db: &mut PgConnection, statements: &[&'static str]) {
    for sql in statements {
        assert_eq!(refusal(db, sql).await.as_deref(), Some("42501"), "{sql}");
    }
}

async fn lacking(db: &mut PgConnection, role: &str) -> Vec<String> {
    lockstep::roles::lacking(db, role).await.unwrap()
}

/// A database with every table, and the roles with their rights.
async fn database_with_roles(name: &str) -> String {
    let url = shared_postgres().await.unwrap().create_database(name).await.unwrap();
    let applied = run_lockstep(&["roles", "apply"], &[("LOCKSTEP_DATABASE_URL", &url)]).await;
    assert_eq!(applied.code, Some(0), "{applied:?}");
    url
}

#[tokio::test]
async fn a_fleet_runs_with_the_node_role_alone_and_hands_over_its_accounts() {
    let mut world = World::start("node-role").await;
    let applied = world.cli(&["roles", "apply"]).await;
    assert_eq!(applied.code, Some(0), "{applied:?}");
    add_login(&mut world.database().await, "it_fleet", "lockstep_node").await;
    let url = url_as(&world.database_url, "it_fleet");
    let external = world.add_external_account("master").await;
    world.add_followers(external, 2).await;
    // A leased master stores its epoch.
    let leased = world.add_paper_account("leased", Style::Mt5).await;
    let behind = world.add_paper_account("behind", Style::Mt5).await;
    world.add_link(leased, behind, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], external).await;
    let a = world.node("a").database(url.clone()).start();
    world.until_copying().await;
    let links = world.links[..2].to_vec();
    master.open_many(3, "0.10");
    wait_equal(&world, &links, &master).await;
    let mut db = world.database().await;
    // Written by the role: rows of every table that a node owns, and a month for copy events.
    until("every kind of row", SOON, async || {
        let rows: i64 = sqlx::query_scalar(
            "select (select count(*) from pairs where state = 'open')
                 * (select count(*) from copy_events) * (select count(*) from account_status)
                 * (select count(*) from lease_nodes)
                 * (select count(*) from trading_accounts where epoch_max > 0)",
        )
        .fetch_one(&mut db)
        .await
        .unwrap();
        (rows > 0).then_some(())
    })
    .await;
    // The next owner gets them by a release.
    let page = MetricsPage::free().await;
    let _b =
        world.node("b").database(url).setting("LOCKSTEP_METRICS_LISTEN", page.address()).start();
    a.process.terminate().unwrap();
    let status = a.process.wait(TAKEOVER).await.unwrap();
    assert!(status.success(), "{status}\n{}", a.process.log_tail());
    world.until_copying().await;
    assert_eq!(page.expired_tenures().await, 0.0, "they were released");
    master.open("0.20");
    wait_equal(&world, &links, &master).await;
    assert_clean(&world.ledger().await);
}

async fn wait_equal(world: &World, links: &[Link], master: &Master) {
    until("the copies of the external master", SOON, async || {
        let ledger = world.ledger().await;
        let differs = differences(&State::of_book(&master.book), links, &ledger);
        differs.is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn each_role_may_do_its_own_work_and_nothing_else() {
    let url = database_with_roles("roles").await;
    let mut owner = PgConnection::connect(&url).await.unwrap();
    for (login, role) in [
        ("it_node", "lockstep_node"),
        ("it_api", "lockstep_api"),
        ("it_readonly", "lockstep_readonly"),
    ] {
        add_login(&mut owner, login, role).await;
    }
    assert_allowed(
        &mut owner,
        &["insert into trading_accounts (platform, name) values ('external', 'm'), ('paper', 'f')"],
    )
    .await;

    let mut api = PgConnection::connect(&url_as(&url, "it_api")).await.unwrap();
    assert_allowed(
        &mut api,
        &[
            "insert into trading_accounts (platform, name, connection) values ('paper', 'g', '{}')",
            "update trading_accounts set enabled = false where name = 'g'",
            // Since when it has no owner is written by the tables' owner.
            "update trading_accounts set enabled = true where name = 'g'",
            "insert into copy_links (master_id, follower_id, magic) select m.id, f.id, 1
             from trading_accounts m, trading_accounts f where m.name = 'm' and f.name = 'f'",
            "update copy_links set enabled = false",
            "select * from pairs",
            "insert into account_credentials (account_id, key_id, wrapped_key, sealed)
             select id, '0123456789abcdef', decode(repeat('00', 60), 'hex'), decode(repeat('00', 40), 'hex')
             from trading_accounts where name = 'f'",
            "update account_credentials set key_id = '0123456789abcdee'
             where wrapped_key = decode(repeat('00', 60), 'hex')",
        ],
    )
    .await;
    assert_denied(
        &mut api,
        &[
            "select sealed from account_credentials",
            "update trading_accounts set node_id = 'me', lease_until = now() + interval '1 day'",
            "update trading_accounts set lease_token = 99",
            "update trading_accounts set epoch_max = 99",
            "insert into trading_accounts (platform, name, node_id) values ('paper', 'h', 'me')",
            "delete from trading_accounts",
            "insert into lease_nodes (node_id, platforms, capacity, owned, alive_until)
             values ('me', '{paper}', 1, 0, now())",
            "update pairs set state = 'closed'",
            "delete from copy_events",
            "drop table pairs",
        ],
    )
    .await;
    assert_eq!(lacking(&mut api, "lockstep_api").await, [""; 0]);
    assert!(
        lacking(&mut api, "lockstep_node").await.contains(&"update of trading_accounts".into())
    );

    let mut node = PgConnection::connect(&url_as(&url, "it_node")).await.unwrap();
    assert_allowed(
        &mut node,
        &[
            "update trading_accounts set node_id = 'n', lease_token = 1 where name = 'f'",
            "select id from trading_accounts where name = 'f' for key share",
            "update copy_links set untaggable_since = now()",
            "select copy_events_make_partitions(4)",
            "select sealed from account_credentials",
        ],
    )
    .await;
    assert_denied(
        &mut node,
        &[
            "update trading_accounts set enabled = false",
            "update trading_accounts set connection = '{\"address\":\"elsewhere:1\"}'",
            "insert into trading_accounts (platform, name) values ('paper', 'i')",
            "update copy_links set sizing_value = 100",
            "update account_credentials set sealed = wrapped_key",
            "delete from pairs",
            "delete from copy_events",
            "select copy_events_drop_partitions(1)",
            "create table mine (id bigint)",
        ],
    )
    .await;
    // What the doctor goes by, and a node that is to serve the API.
    assert_eq!(lacking(&mut node, "lockstep_node").await, [""; 0]);
    let lacks = lacking(&mut node, "lockstep_api").await;
    for right in ["select of api_tokens", "update of fleet_mode", "update of trading_accounts"] {
        assert!(lacks.contains(&right.to_owned()), "{right}: {lacks:?}");
    }
    assert!(!lacks.contains(&"select of pairs".to_owned()), "{lacks:?}");
    let variables = [
        ("LOCKSTEP_DATABASE_URL", &*url_as(&url, "it_node")),
        ("LOCKSTEP_API_LISTEN", "127.0.0.1:0"),
    ];
    let refused = run_lockstep(&["node"], &variables).await;
    assert_eq!(refused.code, Some(3), "{refused:?}");
    for word in ["LOCKSTEP_API_LISTEN", "select of api_tokens", "grant lockstep_api to it_node"] {
        assert!(refused.stderr.contains(word), "{word}: {refused:?}");
    }
    let looked = run_lockstep(&["doctor", "--json"], &variables).await;
    let checks = looked.json();
    let outcome = |name: &str| {
        let all = checks.as_array().unwrap();
        let found = all.iter().find(|check| check["check"] == name);
        found.unwrap_or_else(|| panic!("{name}: {checks}"))["outcome"].clone()
    };
    assert_eq!(outcome("postgres rights"), "ok", "{checks}");
    assert_eq!(outcome("postgres rights of the API"), "fail", "{checks}");
    for role in ["lockstep_node", "lockstep_api"] {
        assert_eq!(lacking(&mut owner, role).await, [""; 0], "{role}");
    }

    let mut readonly = PgConnection::connect(&url_as(&url, "it_readonly")).await.unwrap();
    assert_allowed(
        &mut readonly,
        &[
            "select * from trading_accounts, copy_links, pairs, copy_events, account_status, lease_nodes limit 1",
        ],
    )
    .await;
    assert_denied(
        &mut readonly,
        &[
            "update trading_accounts set enabled = false",
            "insert into trading_accounts (platform, name) values ('paper', 'j')",
            "delete from copy_links",
            "update account_status set detail = 'x'",
            "select key_id from account_credentials",
            "insert into copy_events select * from copy_events",
            "select id from trading_accounts for key share",
            "select copy_events_make_partitions(5)",
            "create table mine (id bigint)",
        ],
    )
    .await;
}

/// Which of the three may do this to the column, or to any part of the table without one.
async fn those_who_may(
    db: &mut PgConnection,
    action: &str,
    table: &str,
    column: Option<&str>,
) -> Vec<String> {
    let sql = match (column, action) {
        (Some(_), _) => "has_column_privilege('lockstep_' || r, $1, $2, $3)",
        (None, "delete" | "truncate") => "has_table_privilege('lockstep_' || r, $1, $3)",
        (None, _) => "has_any_column_privilege('lockstep_' || r, $1, $3)",
    };
    let sql = format!(
        "select r from unnest(array['node', 'api', 'readonly']) with ordinality u (r, place)
         where $2::text is distinct from '-' and {sql} order by place"
    );
    let asked = sqlx::query_scalar(AssertSqlSafe(sql)).bind(table).bind(column).bind(action);
    asked.fetch_all(db).await.unwrap()
}

// A right too much is missed by nobody: each that moves money, tells a secret or forgets what was
// done is named here with those who have it.
#[tokio::test]
async fn a_dangerous_right_is_with_those_who_need_it_and_with_nobody_else() {
    let url = database_with_roles("roles-exact").await;
    let mut owner = PgConnection::connect(&url).await.unwrap();
    let (node, api, nobody) = (&["node"][..], &["api"][..], &[][..]);
    let both = &["node", "api"][..];
    for (action, table, columns, whose) in [
        (
            "update",
            "trading_accounts",
            "node_id lease_until lease_token free_since epoch_max",
            node,
        ),
        (
            "insert",
            "trading_accounts",
            "id node_id lease_until lease_token free_since epoch_max",
            nobody,
        ),
        ("update", "trading_accounts", "enabled mode connection platform name", api),
        ("update", "trading_accounts", "id", nobody),
        ("update", "copy_links", "enabled mode master_id follower_id magic sizing_value", api),
        ("update", "copy_links", "untaggable_since", both),
        ("insert", "copy_links", "", api),
        ("insert", "fleet_mode", "", api),
        ("update", "fleet_mode", "", api),
        ("select", "account_credentials", "sealed", node),
        ("insert", "account_credentials", "", api),
        ("update", "account_credentials", "", api),
        ("delete", "account_credentials", "", api),
        ("select", "api_tokens", "", api),
        ("insert", "api_tokens", "", api),
        ("update", "api_tokens", "", api),
        ("insert", "pairs", "", node),
        ("update", "pairs", "", node),
        ("insert", "copy_events", "", node),
        ("update", "copy_events", "", nobody),
        ("insert", "account_status", "", node),
        ("update", "account_status", "", node),
        ("insert", "lease_nodes", "", node),
        ("update", "lease_nodes", "", node),
        ("delete", "lease_nodes", "", node),
        ("insert", "node_minutes", "", node),
        ("delete", "node_minutes", "", node),
    ] {
        // Without a column it is any of them.
        let columns = columns.split(' ').map(|column| (!column.is_empty()).then_some(column));
        for column in columns {
            let may = those_who_may(&mut owner, action, table, column).await;
            assert_eq!(may, whose, "{action} of {table} {column:?}");
        }
    }
    for table in
        ["trading_accounts", "copy_links", "pairs", "copy_events", "account_status", "fleet_mode"]
    {
        assert_eq!(those_who_may(&mut owner, "delete", table, None).await, [""; 0], "{table}");
    }
    let odd: Vec<String> = sqlx::query_scalar(
        "select c.relname || ' ' || r from pg_class c, unnest(array['node', 'api', 'readonly']) r
         where c.relnamespace = current_schema()::regnamespace and c.relkind in ('r', 'p', 'v')
           and (has_table_privilege('lockstep_' || r, c.oid, 'truncate, trigger')
             or r = 'readonly' and (has_any_column_privilege('lockstep_' || r, c.oid, 'insert, update')
                                    or has_table_privilege('lockstep_' || r, c.oid, 'delete')))
         union all
         select 'server ' || rolname from pg_roles where starts_with(rolname, 'lockstep_')
           and (rolcanlogin or rolsuper or rolcreaterole or rolcreatedb or rolbypassrls)",
    )
    .fetch_all(&mut owner)
    .await
    .unwrap();
    assert!(odd.is_empty(), "{odd:?}");
}

// A table that nobody thought of would be closed to everybody, and be noticed in production.
#[tokio::test]
async fn every_table_is_open_to_the_role_that_works_with_it() {
    let url = database_with_roles("roles-tables").await;
    let mut owner = PgConnection::connect(&url).await.unwrap();
    let closed: Vec<String> = sqlx::query_scalar(
        "select c.relname::text from pg_class c
         where c.relnamespace = current_schema()::regnamespace and c.relkind in ('r', 'p', 'v')
           and not c.relispartition
           and not exists (
               select from unnest(array['lockstep_node', 'lockstep_api', 'lockstep_readonly']) r
               where has_any_column_privilege(r, c.oid, 'select'))",
    )
    .fetch_all(&mut owner)
    .await
    .unwrap();
    assert!(closed.is_empty(), "say in node/src/roles/grant.sql who may read {closed:?}");
}

#[tokio::test]
async fn what_the_list_does_not_name_is_taken_back_and_nobody_sees_hashes_of_tokens() {
    let url = database_with_roles("roles-back").await;
    let mut owner = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql(
        "create table extra (id bigint);
         grant select on extra to lockstep_readonly;
         grant update on pairs to lockstep_readonly;
         grant update (lease_token) on trading_accounts to lockstep_readonly;
         create table if not exists api_tokens (hash text);
         grant select on api_tokens to lockstep_readonly",
    )
    .execute(&mut owner)
    .await
    .unwrap();
    lockstep::roles::grant(&mut owner).await.unwrap();
    let left: Vec<String> = sqlx::query_scalar(
        "select c.relname::text from pg_class c
         where c.relname in ('extra', 'pairs', 'trading_accounts', 'api_tokens')
           and (has_any_column_privilege('lockstep_readonly', c.oid, 'update')
                or c.relname in ('extra', 'api_tokens')
                and has_any_column_privilege('lockstep_readonly', c.oid, 'select'))",
    )
    .fetch_all(&mut owner)
    .await
    .unwrap();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn a_node_that_may_not_migrate_refuses_a_schema_that_is_not_its_own() {
    let url = database_with_roles("roles-schema").await;
    let mut owner = PgConnection::connect(&url).await.unwrap();
    add_login(&mut owner, "it_behind", "lockstep_node").await;
    let own: i64 = sqlx::query_scalar("select max(version) from _sqlx_migrations")
        .fetch_one(&mut owner)
        .await
        .unwrap();
    let node_url = url_as(&url, "it_behind");
    let start = async || {
        let variables = [("LOCKSTEP_DATABASE_URL", node_url.as_str())];
        let refused = run_lockstep(&["node"], &variables).await;
        assert_eq!(refused.code, Some(3), "{refused:?}");
        refused.stderr
    };
    sqlx::query("update _sqlx_migrations set version = version + 1000 where version = $1")
        .bind(own)
        .execute(&mut owner)
        .await
        .unwrap();
    let newer = start().await;
    let versions = format!("newer than this program, at migration {} and not at {own}", own + 1000);
    assert!(newer.contains(&versions), "{newer}");
    sqlx::query("delete from _sqlx_migrations where version > $1")
        .bind(own)
        .execute(&mut owner)
        .await
        .unwrap();
    let older = start().await;
    let told = "role \"it_behind\" may not change it: run `lockstep roles apply`";
    assert!(older.contains(told), "{older}");
}

#[tokio::test]
async fn an_owner_that_may_not_create_roles_is_told_what_to_do_and_migrates_all_the_same() {
    let server = devstack::Postgres::start(&devstack::Tools::locate().unwrap()).await.unwrap();
    let url = server.create_database("roles-owner").await.unwrap();
    let mut admin = PgConnection::connect(&url).await.unwrap();
    let name: String =
        sqlx::query_scalar("select current_database()::text").fetch_one(&mut admin).await.unwrap();
    let sql = format!("create role plain login; alter database \"{name}\" owner to plain");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await.unwrap();
    let plain = url_as(&url, "plain");
    let variables = [("LOCKSTEP_DATABASE_URL", plain.as_str())];
    let refused = run_lockstep(&["roles", "apply"], &variables).await;
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(
        refused.stderr.contains("may not create the missing roles: lockstep_api, "),
        "{refused:?}"
    );
    // The tables are there; an administrator makes the roles, and the owner grants.
    let printed = run_lockstep(&["roles", "print"], &[]).await;
    let (create, _) = printed.stdout.split_once("-- What each role").unwrap();
    sqlx::raw_sql(AssertSqlSafe(create.to_owned())).execute(&mut admin).await.unwrap();
    let done = run_lockstep(&["roles", "apply"], &variables).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    let granted: bool =
        sqlx::query_scalar("select has_table_privilege('lockstep_readonly', 'pairs', 'select')")
            .fetch_one(&mut admin)
            .await
            .unwrap();
    assert!(granted);
}
