//! `lockstep doctor`: whether a node could work here, check by check, and how to mend what is wrong.
//!
//! In: the settings of a node, its database and its bus. Out: one line a check: ok, warn or fail. It
//! changes nothing that anybody reads: what it says on the bus is about an account that cannot be.
//!
//! Not covered: brokers. Whether an account can be used there is what its session says
//! (`lockstep status`).

use super::settings::{SettingsArg, Sourced};
use super::table::{TableRow, render};
use super::{CliError, block_on, config, migrate, out};
use crate::causes::with_causes;
use crate::clock::NodeClock;
use crate::config::{NodeConfig, Vars};
use crate::credentials::{MasterKeys, Unopened};
use crate::lease::predecessor;
use crate::secret::SecretUrl;
use crate::{database, directory, lease, roles};
use bus::ClientSettings;
use clap::Args;
use futures_util::StreamExt;
use schemas::codec::{MESSAGE_BYTES_MAX, VERSION, encode_control_request};
use schemas::control::{ControlRequest, ControlVerb};
use schemas::{AccountId, subject};
use serde::Serialize;
use sqlx::postgres::PgConnection;
use sqlx::{ConnectOptions, Row};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Longest wait for the database.
const REACHED_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for one's own word on the bus.
const ECHO_WITHIN: Duration = Duration::from_secs(2);
/// More is told: times of rows and of other nodes would not fit together.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(1);
/// The major version that the tests run with.
const POSTGRES_TESTED: i32 = 18;
/// Servers of a cluster, of which one may fail.
const SERVERS_WANTED: usize = 3;

/// Arguments of `lockstep doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    settings: SettingsArg,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    /// As it should be.
    Ok,
    /// It works, and something is worth a look.
    Warn,
    /// A node would not work, or not safely.
    Fail,
}

#[derive(Debug, Serialize)]
struct Check {
    check: &'static str,
    outcome: Outcome,
    says: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl TableRow for Check {
    const HEAD: &'static [&'static str] = &["check", "outcome", "says"];
    fn cells(&self) -> Vec<String> {
        let outcome = match self.outcome {
            Outcome::Ok => "ok",
            Outcome::Warn => "warn",
            Outcome::Fail => "FAIL",
        };
        let fix = self.fix.as_ref().map_or_else(String::new, |fix| format!("\n→ {fix}"));
        vec![self.check.to_owned(), outcome.to_owned(), format!("{}{fix}", self.says)]
    }
}

#[derive(Default)]
struct Checks(Vec<Check>);

impl Checks {
    fn ok(&mut self, check: &'static str, says: impl Into<String>) {
        self.0.push(Check { check, outcome: Outcome::Ok, says: says.into(), fix: None });
    }

    fn warn(&mut self, check: &'static str, says: impl Into<String>, fix: &str) {
        let fix = Some(fix.to_owned());
        self.0.push(Check { check, outcome: Outcome::Warn, says: says.into(), fix });
    }

    fn fail(&mut self, check: &'static str, says: impl Into<String>, fix: &str) {
        let fix = Some(fix.to_owned());
        self.0.push(Check { check, outcome: Outcome::Fail, says: says.into(), fix });
    }
}

/// Runs `lockstep doctor`.
pub fn run(args: DoctorArgs) -> Result<(), CliError> {
    let vars = args.settings.read()?;
    examine(&vars, args.json)
}

/// Checks everything that these settings name, and says what was found.
pub(super) fn examine(vars: &Sourced, json: bool) -> Result<(), CliError> {
    let mut checks = Checks::default();
    let config = settings(vars, &mut checks);
    let wanted = Wanted::of(vars, config.as_ref());
    block_on(async {
        postgres(vars, wanted, &mut checks).await;
        nats(vars, &mut checks).await;
    })?;
    machine(config.as_ref(), &mut checks);
    let Checks(checks) = checks;
    if json {
        out::json(&checks)?;
    } else {
        out::line(render(Check::HEAD, checks.iter().map(TableRow::cells)))?;
    }
    let failed = checks.iter().filter(|check| check.outcome == Outcome::Fail).count();
    match failed {
        0 => Ok(()),
        1 => Err(CliError::No("1 check failed".to_owned())),
        failed => Err(CliError::No(format!("{failed} checks failed"))),
    }
}

fn settings(vars: &Sourced, checks: &mut Checks) -> Option<NodeConfig> {
    match config::read(vars) {
        Ok(config) => {
            checks.ok("settings", "every setting is valid, and so are their relations");
            Some(config)
        }
        Err(faults) => {
            for fault in faults {
                checks.fail("settings", fault, "`lockstep node --settings` explains every setting");
            }
            None
        }
    }
}

fn machine(config: Option<&NodeConfig>, checks: &mut Checks) {
    let Some(config) = config else { return };
    match &config.state_folder {
        None => checks.warn(
            "state folder",
            "none: a node that is started again after a crash waits for its own leases to run out",
            "set LOCKSTEP_STATE_FOLDER to a folder on a local disk",
        ),
        Some(folder) => match predecessor::check_folder(folder) {
            Ok(()) => checks.ok("state folder", folder.display().to_string()),
            Err(error) => checks.fail(
                "state folder",
                with_causes(&error),
                "give LOCKSTEP_STATE_FOLDER a folder on a local disk that this user may write",
            ),
        },
    }
    for (check, name, listen) in [
        ("metrics", "LOCKSTEP_METRICS_LISTEN", Some(config.metrics_listen)),
        ("api", "LOCKSTEP_API_LISTEN", config.api_listen),
    ] {
        if let Some(listen) = listen {
            free(check, name, listen, checks);
        }
    }
}

fn free(check: &'static str, name: &str, listen: SocketAddr, checks: &mut Checks) {
    match std::net::TcpListener::bind(listen) {
        Ok(_) => checks.ok(check, format!("{listen} is free")),
        Err(error) => checks.warn(
            check,
            format!("{listen}: {error}"),
            &format!("a node that runs here already has it; another one needs a {name} of its own"),
        ),
    }
}

/// Whether an address stays on this machine, so that nobody can listen in between.
fn is_local(place: &str) -> bool {
    let host = match place.strip_prefix('[') {
        Some(bracketed) => bracketed.split(']').next().unwrap_or_default(),
        // One colon stands before a port, several are an address of IPv6.
        None => match place.split_once(':') {
            Some((host, port)) if !port.contains(':') => host,
            Some(_) | None => place,
        },
    };
    let is_loopback = |address: IpAddr| address.is_loopback();
    host.starts_with('/') || host == "localhost" || host.parse().is_ok_and(is_loopback)
}

/// What the settings ask of the database, beside what every node does; they need not be valid.
#[derive(Debug, Clone)]
struct Wanted {
    /// The API is to be served.
    api: bool,
    /// What opens passwords of accounts; absent where the settings cannot be read.
    master_keys: Option<Option<MasterKeys>>,
}

impl Wanted {
    fn of(vars: &Sourced, config: Option<&NodeConfig>) -> Self {
        let is_set = |name| vars.get(name).is_some_and(|text| !text.trim().is_empty());
        Wanted {
            api: is_set("LOCKSTEP_API_LISTEN"),
            master_keys: config.map(|config| config.master_keys.clone()),
        }
    }
}

async fn postgres(vars: &Sourced, wanted: Wanted, checks: &mut Checks) {
    const URL: &str = "LOCKSTEP_DATABASE_URL";
    let check = "postgres";
    let Some(url) = vars.get(URL).filter(|url| !url.is_empty()) else {
        return checks.fail(check, format!("{URL} is missing"), "set it, or run `lockstep init`");
    };
    let read = crate::config::check_database_url(&url)
        .and_then(|()| database::options(&url, "doctor").map_err(|error| with_causes(&error)));
    let options = match read {
        Ok(options) => options,
        Err(what) => return checks.fail(check, format!("{URL} {what}"), "mend the setting"),
    };
    let shown = SecretUrl::new(url.as_str());
    let connected = async {
        let began = Instant::now();
        let one = options.connect().await?;
        Ok::<_, sqlx::Error>((one, options.connect().await?, began.elapsed()))
    };
    let fix = "start the server, and look at address, user, password and pg_hba.conf";
    let (mut db, mut other, took) = match tokio::time::timeout(REACHED_WITHIN, connected).await {
        Ok(Ok(connected)) => connected,
        Ok(Err(error)) => {
            return checks.fail(check, format!("{shown}: {}", with_causes(&error)), fix);
        }
        Err(_) => {
            let says = format!("{shown}: no answer within {REACHED_WITHIN:?}");
            return checks.fail(check, says, fix);
        }
    };
    checks.ok(check, format!("{shown} answers, two connections within {} ms", took.as_millis()));
    match lease::leads_to_pooler(&mut db, &mut other).await {
        Ok(false) => checks.ok("postgres pooler", "a connection keeps its server process"),
        Ok(true) => checks.fail(
            "postgres pooler",
            "connections change their server process: a pooler in transaction mode",
            "let LOCKSTEP_DATABASE_URL name the server itself",
        ),
        Err(error) => checks.fail("postgres pooler", with_causes(&error), fix),
    }
    let _closed = sqlx::Connection::close(other).await;
    let looked = look_at_postgres(&mut db, &options, wanted, checks);
    match tokio::time::timeout(REACHED_WITHIN, looked).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => checks.fail(check, with_causes(&error), "look at the server's log"),
        Err(_) => checks.fail(check, format!("did not answer within {REACHED_WITHIN:?}"), fix),
    }
}

async fn look_at_postgres(
    db: &mut PgConnection,
    options: &sqlx::postgres::PgConnectOptions,
    wanted: Wanted,
    checks: &mut Checks,
) -> Result<(), sqlx::Error> {
    let row = sqlx::query(
        "select current_setting('server_version_num')::int / 10000 as major, \
         current_setting('server_version') as version, pg_is_in_recovery() as is_replica, \
         current_setting('transaction_read_only') = 'on' as is_read_only, \
         coalesce((select ssl from pg_stat_ssl where pid = pg_backend_pid()), false) as is_tls, \
         has_schema_privilege(current_schema(), 'create') as may_create, \
         current_user::text as role",
    )
    .fetch_one(&mut *db)
    .await?;
    let (major, version): (i32, String) = (row.get("major"), row.get("version"));
    if major == POSTGRES_TESTED {
        checks.ok("postgres version", version);
    } else {
        let fix = format!("Lockstep is tested with {POSTGRES_TESTED}");
        checks.warn("postgres version", version, &fix);
    }
    if row.get("is_replica") || row.get("is_read_only") {
        checks.fail(
            "postgres primary",
            "it is a replica, or read-only",
            "let LOCKSTEP_DATABASE_URL name the primary",
        );
    } else {
        checks.ok("postgres primary", "it takes writes");
    }
    if row.get("is_tls") {
        checks.ok("postgres tls", "the connection is encrypted");
    } else if is_local(options.get_host()) {
        checks.ok("postgres tls", "not encrypted, and does not leave this machine");
    } else {
        checks.warn(
            "postgres tls",
            "passwords and rows travel in the clear",
            "add ?sslmode=verify-full&sslrootcert=... to LOCKSTEP_DATABASE_URL",
        );
    }
    look_at_schema(db, &row, wanted, checks).await?;
    look_at_clock(db, checks).await?;
    let identifier: Result<i64, sqlx::Error> =
        sqlx::query_scalar("select system_identifier from pg_control_system()").fetch_one(db).await;
    match identifier {
        Ok(_) => checks.ok("postgres timeline", "a promotion of a replica will be noticed"),
        Err(_) => checks.warn(
            "postgres timeline",
            "the server does not tell its identifier: two primaries at once are not noticed",
            "grant execute on function pg_control_system() to the node's role",
        ),
    }
    Ok(())
}

async fn look_at_schema(
    db: &mut PgConnection,
    row: &sqlx::postgres::PgRow,
    wanted: Wanted,
    checks: &mut Checks,
) -> Result<(), sqlx::Error> {
    let role: String = row.get("role");
    let steps = migrate::read(db).await?;
    let missing = steps.iter().filter(|step| step.state == migrate::State::Missing).count();
    let obstacles = migrate::obstacles(&steps);
    for obstacle in &obstacles {
        checks.fail(
            "postgres schema",
            obstacle.clone(),
            "run the build that made this schema, or a newer one (`lockstep migrate status`)",
        );
    }
    match (missing, obstacles.is_empty()) {
        (0, true) => {
            checks.ok("postgres schema", format!("{} migrations are applied", steps.len()))
        }
        (0, false) => {}
        (missing, _) if row.get("may_create") => checks.warn(
            "postgres schema",
            format!("{missing} migrations are missing"),
            "`lockstep migrate` applies them; a node does so at its start",
        ),
        (missing, _) => checks.fail(
            "postgres schema",
            format!("{missing} migrations are missing, and role {role} may not create tables"),
            "run `lockstep migrate` with a role that owns the schema",
        ),
    }
    if missing == steps.len() {
        return Ok(());
    }
    look_at_rights(db, wanted.api, &role, checks).await?;
    if let Some(keys) = &wanted.master_keys {
        look_at_passwords(db, keys.as_ref(), checks).await?;
    }
    Ok(())
}

/// Whether there are passwords that a node with these master keys could not open. Who may not look, or
/// has no such table yet, is not told.
async fn look_at_passwords(
    db: &mut PgConnection,
    keys: Option<&MasterKeys>,
    checks: &mut Checks,
) -> Result<(), sqlx::Error> {
    let may_look: Option<bool> = sqlx::query_scalar(
        "select has_column_privilege(to_regclass('account_credentials'), 'key_id', 'select')",
    )
    .fetch_one(&mut *db)
    .await?;
    if may_look != Some(true) {
        return Ok(());
    }
    let wrapped = directory::count_wrapped(db).await?;
    let (check, fix) =
        ("master key", "give the node the file of the master keys by LOCKSTEP_MASTER_KEY_FILE");
    match Unopened::among(&wrapped, keys) {
        Some(unopened) if unopened.is_wrong_key() => checks.fail(check, unopened.to_string(), fix),
        Some(unopened) => checks.warn(check, unopened.to_string(), fix),
        None if keys.is_some() && !wrapped.is_empty() => {
            checks.ok(check, "every stored password can be opened here");
        }
        None => {}
    }
    Ok(())
}

/// Whether the role may do what a node does, and what the API does where there is one.
async fn look_at_rights(
    db: &mut PgConnection,
    serves_api: bool,
    role: &str,
    checks: &mut Checks,
) -> Result<(), sqlx::Error> {
    let node = ("postgres rights", "a node", "lockstep_node");
    let api = ("postgres rights of the API", "the API (LOCKSTEP_API_LISTEN)", "lockstep_api");
    for (check, whose, group) in [Some(node), serves_api.then_some(api)].into_iter().flatten() {
        let lacking = roles::lacking(db, group).await?;
        if lacking.is_empty() {
            checks.ok(check, format!("role {role} may do what {whose} does"));
            continue;
        }
        let fix = format!(
            "if it is the login of a node, make it a member: `grant {group} to {role}`, after `lockstep \
             roles apply` with the role that owns the tables; if it is a person's, run this with the \
             settings of a node"
        );
        let says = format!("role {role} may not do what {whose} does: {}", lacking.join(", "));
        checks.fail(check, says, &fix);
    }
    Ok(())
}

async fn look_at_clock(db: &mut PgConnection, checks: &mut Checks) -> Result<(), sqlx::Error> {
    let clock = NodeClock::system();
    let (before, began) = (clock.wall(), Instant::now());
    let theirs: time::OffsetDateTime =
        sqlx::query_scalar("select clock_timestamp()").fetch_one(db).await?;
    // It was read somewhere between question and answer.
    let way_us = i64::try_from(began.elapsed().as_micros()).unwrap_or(i64::MAX);
    let off_us = directory::micros(theirs).0 - before.0 - way_us / 2;
    let off = Duration::from_micros(off_us.unsigned_abs());
    let says = format!(
        "the database's clock is {off:?} {}, known to {:?}",
        if off_us >= 0 { "ahead" } else { "behind" },
        Duration::from_micros(way_us.unsigned_abs() / 2)
    );
    if off <= CLOCKS_APART_MAX {
        checks.ok("clocks", says);
    } else {
        checks.warn(
            "clocks",
            says,
            "leases need no equal clocks, but times of rows and events will not fit together: run a \
             time service on both machines",
        );
    }
    Ok(())
}

async fn nats(vars: &Sourced, checks: &mut Checks) {
    let text = vars.get("LOCKSTEP_NATS_URLS").filter(|text| !text.trim().is_empty());
    let text = text.unwrap_or_else(|| "nats://127.0.0.1:4222".to_owned());
    let urls: Vec<String> = text.split(',').map(|url| url.trim().to_owned()).collect();
    let shown: Vec<String> = urls.iter().map(|url| SecretUrl::new(url).to_string()).collect();
    let shown = shown.join(",");
    let certificates = vars.get("LOCKSTEP_NATS_ROOT_CERTIFICATES").filter(|path| !path.is_empty());
    let settings = ClientSettings {
        root_certificates: certificates.map(PathBuf::from),
        ..ClientSettings::new(urls.clone(), "lockstep-doctor")
    };
    let check = "nats";
    let client = match bus::connect(&settings).await {
        Ok(client) => client,
        Err(error) => {
            return checks.fail(
                check,
                format!("{shown}: {}", with_causes(&error)),
                "look at LOCKSTEP_NATS_URLS and LOCKSTEP_NATS_ROOT_CERTIFICATES",
            );
        }
    };
    if let Err(refused) = bus::connected(&client, &settings).await {
        return checks.fail(check, refused.to_string(), &mend(&refused));
    }
    let info = client.server_info();
    checks.ok(check, format!("{shown}: connected to {} {}", info.server_name, info.version));
    look_at_server(&info, &urls, checks);
    let denied = echoes(&client).await;
    if denied.is_empty() {
        checks.ok("nats permissions", "a node may say and hear everything that it needs");
    } else {
        checks.fail(
            "nats permissions",
            format!("no echo on {}", denied.join(", ")),
            "use the user of a node (`lockstep nats add FOLDER --node NAME`)",
        );
    }
}

/// What to do about each reason, once.
fn mend(refused: &bus::NotConnected) -> String {
    let fix = |refusal: &bus::Refusal| match refusal {
        bus::Refusal::Login { .. } => {
            "take the user and its secret from its file of `lockstep nats`; if it was just added, copy \
             users.conf to the servers and reload them"
        }
        bus::Refusal::Tls(_) => {
            "let LOCKSTEP_NATS_ROOT_CERTIFICATES name the ca.pem of this cluster, and the addresses \
             the servers as their certificates do"
        }
        bus::Refusal::NameNotFound(_) => "look at the name in LOCKSTEP_NATS_URLS",
        bus::Refusal::NobodyListens | bus::Refusal::Silent => {
            "start the server; look at the port, and at what filters packets on the way"
        }
        bus::Refusal::Other(_) => "look at the server's log",
    };
    let fixes: std::collections::BTreeSet<&str> =
        refused.servers.iter().map(|(_, refusal)| fix(refusal)).collect();
    fixes.into_iter().collect::<Vec<_>>().join("; ")
}

fn look_at_server(info: &async_nats::ServerInfo, urls: &[String], checks: &mut Checks) {
    let place = |url: &String| {
        let rest = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
        rest.rsplit_once('@').map_or(rest, |(_, place)| place).to_owned()
    };
    let is_local = urls.iter().all(|url| is_local(&place(url)));
    let is_tls = info.tls_required || urls.iter().all(|url| url.starts_with("tls://"));
    if is_tls || is_local {
        let says = if is_tls { "the connection is encrypted" } else { "it stays on this machine" };
        checks.ok("nats tls", says);
    } else {
        checks.warn(
            "nats tls",
            "trades travel in the clear",
            "`lockstep nats init` makes a cluster with TLS",
        );
    }
    if info.auth_required || is_local {
        let says = if info.auth_required { "users are asked for" } else { "open, on this machine" };
        checks.ok("nats users", says);
    } else {
        checks.warn(
            "nats users",
            "whoever reaches the servers may speak for every master",
            "`lockstep nats init` makes a cluster that knows who may say what",
        );
    }
    if info.max_payload >= MESSAGE_BYTES_MAX {
        checks.ok("nats payload", format!("{} bytes", info.max_payload));
    } else {
        checks.fail(
            "nats payload",
            format!("max_payload is {} bytes: large snapshots would not pass", info.max_payload),
            &format!("set max_payload to {MESSAGE_BYTES_MAX} at least"),
        );
    }
    // A server names the others with itself, and alone it names nobody.
    let servers = info.connect_urls.len().max(1);
    if servers >= SERVERS_WANTED {
        checks.ok("nats cluster", format!("{servers} servers"));
    } else {
        checks.warn(
            "nats cluster",
            format!("{servers} of {SERVERS_WANTED} servers: none may fail"),
            "run three that route to each other",
        );
    }
}

/// The subjects on which one's own word did not come back.
async fn echoes(client: &async_nats::Client) -> Vec<String> {
    // No account has this number, so nobody who listens is misled.
    let nobody = AccountId::MAX;
    let word = format!("doctor-{}", uuid::Uuid::new_v4().simple());
    // The one subject that every node hears gets what every node can read; it wants no answer.
    let request =
        ControlRequest { v: VERSION, account: nobody, verb: ControlVerb::Plan, link: None };
    let request = encode_control_request(&request);
    let subjects = [
        (subject::event(nobody), word.as_bytes().to_vec()),
        (subject::beacon(nobody), word.as_bytes().to_vec()),
        (subject::snapshot(nobody), word.as_bytes().to_vec()),
        (subject::reply(nobody, &word), word.as_bytes().to_vec()),
        (subject::timeline(0), word.as_bytes().to_vec()),
        (subject::control_account(nobody), request),
        (client.new_inbox(), word.as_bytes().to_vec()),
    ];
    let each = subjects.map(|(subject, payload)| async move {
        let heard = async {
            let mut messages = client.subscribe(subject.clone()).await.ok()?;
            client.publish(subject.clone(), payload.clone().into()).await.ok()?;
            while let Some(message) = messages.next().await {
                if message.payload == payload {
                    return Some(());
                }
            }
            None
        };
        let heard = tokio::time::timeout(ECHO_WITHIN, heard).await.ok().flatten();
        heard.is_none().then_some(subject)
    });
    futures_util::future::join_all(each).await.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_somebody_has_is_told_from_a_free_one() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = taken.local_addr().unwrap();
        let mut checks = Checks::default();
        free("api", "LOCKSTEP_API_LISTEN", listen, &mut checks);
        drop(taken);
        free("api", "LOCKSTEP_API_LISTEN", listen, &mut checks);
        let outcomes: Vec<Outcome> = checks.0.iter().map(|check| check.outcome).collect();
        assert_eq!(outcomes, [Outcome::Warn, Outcome::Ok]);
        assert!(checks.0[0].fix.as_ref().unwrap().contains("LOCKSTEP_API_LISTEN"));
    }

    #[tokio::test]
    async fn passwords_that_nobody_here_could_open_are_told() {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database("doctor").await.unwrap();
        let mut db = database::connect_migrated(&url, "test").await.unwrap();
        let mut checks = Checks::default();
        look_at_passwords(&mut db, None, &mut checks).await.unwrap();
        assert!(checks.0.is_empty(), "there are none");
        sqlx::raw_sql(
            "insert into trading_accounts (platform, name) values ('paper', 'one');
             insert into account_credentials (account_id, key_id, wrapped_key, sealed)
             select id, '0123456789abcdef', decode(repeat('00', 60), 'hex'), decode(repeat('00', 40), 'hex')
             from trading_accounts",
        )
        .execute(&mut db)
        .await
        .unwrap();
        look_at_passwords(&mut db, None, &mut checks).await.unwrap();
        let other = MasterKeys::parse(&"07".repeat(32)).unwrap();
        look_at_passwords(&mut db, Some(&other), &mut checks).await.unwrap();
        sqlx::query("update account_credentials set key_id = $1")
            .bind(other.present().id())
            .execute(&mut db)
            .await
            .unwrap();
        look_at_passwords(&mut db, Some(&other), &mut checks).await.unwrap();
        let told: Vec<_> = checks.0.iter().map(|check| (check.check, check.outcome)).collect();
        let of_key = |outcome| ("master key", outcome);
        assert_eq!(told, [Outcome::Warn, Outcome::Fail, Outcome::Ok].map(of_key));
    }

    #[test]
    fn what_stays_on_this_machine_is_told_from_what_does_not() {
        for local in
            ["127.0.0.1", "localhost:4222", "/run/postgresql", "[::1]:4222", "::1", "127.9.9.9:1"]
        {
            assert!(is_local(local), "{local}");
        }
        for remote in [
            "10.0.0.1",
            "db.example",
            "1127.0.0.1",
            "localhost.db.example",
            "127.db.example:1",
            "[fe80::1]:1",
        ] {
            assert!(!is_local(remote), "{remote}");
        }
    }
}
