use super::*;
use crate::credentials::MasterKey;

fn vars(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let url = (DATABASE_URL, "postgres://lockstep:hunter2@db.example:5432/lockstep");
    std::iter::once(&url)
        .chain(pairs)
        .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
        .collect()
}

fn read(pairs: &[(&str, &str)]) -> NodeConfig {
    NodeConfig::from_vars(&vars(pairs)).unwrap()
}

fn faults(pairs: &[(&str, &str)]) -> Vec<String> {
    NodeConfig::from_vars(&vars(pairs)).unwrap_err().faults
}

#[test]
fn defaults_are_those_of_the_design_and_hold_their_own_relations() {
    let config = read(&[]);
    let s = Duration::from_secs;
    assert_eq!(
        (config.lease, config.cycle, config.fence, config.retry),
        (s(60), s(20), s(15), s(2))
    );
    assert_eq!(
        (config.query_limit, config.broker_call_limit, config.send_reserve),
        (s(5), s(10), s(2))
    );
    assert_eq!((config.settle, config.audits), (s(10), vec![s(5), s(30), s(120)]));
    assert_eq!((config.beacon, config.stale), (s(2), s(6)));
    assert_eq!(config.parallel_orders, 16);
}

#[test]
fn node_is_named_after_its_first_platform_and_its_host() {
    let config = read(&[(PLATFORMS, "paper, mt5,fix44")]);
    assert_eq!(config.platforms, ["paper", "fix44", "mt5"]);
    assert!(config.node_name.starts_with("paper-"), "{}", config.node_name);
}

#[test]
fn empty_variable_means_the_default() {
    assert_eq!(read(&[(LEASE, "")]).lease, Duration::from_secs(60));
}

#[test]
fn duration_without_a_unit_is_refused_and_told_what_to_write() {
    assert_eq!(
        faults(&[(LEASE, "60")]),
        [r#"LOCKSTEP_LEASE needs a unit: 60ms, 60s, 60m or 60h, got "60""#]
    );
}

#[test]
fn durations_are_whole_numbers_with_a_known_unit() {
    let ms = Duration::from_millis;
    for (text, wanted) in [
        ("250ms", Some(ms(250))),
        ("60s", Some(ms(60_000))),
        ("2m", Some(ms(120_000))),
        ("24h", Some(ms(86_400_000))),
        ("25h", None),
        ("1.5s", None),
        ("-1s", None),
        ("s", None),
        ("10 s", None),
        ("10sec", None),
        ("99999999999999999999s", None),
        ("18446744073709551615h", None),
        ("", None),
    ] {
        assert_eq!(parse_duration(text).ok(), wanted, "{text:?}");
    }
}

#[test]
fn misspelt_variable_is_refused_with_the_name_that_was_meant() {
    assert_eq!(
        faults(&[("LOCKSTEP_FENSE", "15s"), ("LOCKSTEP_COLOUR_OF_THE_SKY", "blue")]),
        [
            "LOCKSTEP_COLOUR_OF_THE_SKY is no setting",
            "LOCKSTEP_FENSE is no setting; did you mean LOCKSTEP_FENCE?",
        ]
    );
}

#[test]
fn variables_of_others_are_not_looked_at() {
    assert_eq!(read(&[("LOCKSTEPPE", "x"), ("PATH", "/bin"), ("LOCKSTEP_TOOLS", "/t")]), read(&[]));
}

#[test]
fn all_faults_are_reported_at_once() {
    let faults = faults(&[
        (LEASE, "sixty"),
        (CAPACITY, "-4"),
        (PLATFORMS, "paper,MT5"),
        (METRICS_LISTEN, "9464"),
        (AUDITS, "30s,5s"),
        (NATS_URLS, "nats://a:4222,http://b"),
        (NODE_NAME, "a b"),
        (CYCLE, "0s"),
    ]);
    for name in [LEASE, CAPACITY, PLATFORMS, METRICS_LISTEN, AUDITS, NATS_URLS, NODE_NAME, CYCLE] {
        assert_eq!(faults.iter().filter(|fault| fault.starts_with(name)).count(), 1, "{faults:#?}");
    }
    assert_eq!(faults.len(), 8, "{faults:#?}");
}

#[test]
fn state_folder_is_off_by_default_and_must_not_depend_on_where_the_node_was_started() {
    assert_eq!(read(&[]).state_folder, None);
    let config = read(&[("LOCKSTEP_STATE_FOLDER", "/var/lib/lockstep")]);
    assert_eq!(config.state_folder, Some("/var/lib/lockstep".into()));
    let faults = faults(&[("LOCKSTEP_STATE_FOLDER", "state")]);
    assert_eq!(faults, ["LOCKSTEP_STATE_FOLDER must be an absolute path, got \"state\""]);
}

#[test]
fn api_is_off_by_default_and_needs_an_address_and_a_port() {
    assert_eq!(read(&[]).api_listen, None);
    let config = read(&[("LOCKSTEP_API_LISTEN", "127.0.0.1:9470")]);
    assert_eq!(config.api_listen, Some(([127, 0, 0, 1], 9470).into()));
    let faults = faults(&[("LOCKSTEP_API_LISTEN", "9470")]);
    assert!(faults[0].starts_with("LOCKSTEP_API_LISTEN must be an address"), "{faults:?}");
}

#[test]
fn missing_database_is_a_fault() {
    let error = NodeConfig::from_vars(&BTreeMap::new()).unwrap_err();
    assert_eq!(error.to_string(), "1 setting is wrong:\n  LOCKSTEP_DATABASE_URL is missing");
}

#[test]
fn timing_that_leaves_no_room_for_a_failed_renewal_is_refused() {
    assert_eq!(read(&[(LEASE, "60s")]).lease, Duration::from_secs(60));
    let faults = faults(&[(LEASE, "59999ms")]);
    assert_eq!(faults.len(), 1, "{faults:#?}");
    assert!(faults[0].contains("59.999s - 15s is less than 2 x 20s + 5s"), "{}", faults[0]);
}

#[test]
fn fence_that_cannot_hold_a_broker_call_is_refused() {
    assert_eq!(read(&[(FENCE, "13s")]).fence, Duration::from_secs(13));
    let faults = faults(&[(FENCE, "12999ms")]);
    assert_eq!(faults.len(), 1, "{faults:#?}");
    assert!(faults[0].contains("12.999s is less than 10s + 2s + 1s"), "{}", faults[0]);
}

#[test]
fn nonsense_timing_names_every_broken_relation() {
    let faults = faults(&[
        (LEASE, "20s"),
        (FENCE, "25s"),
        (RETRY, "499ms"),
        (CYCLE, "400ms"),
        (BEACON, "6s"),
        (BROKER_CALL_LIMIT, "30s"),
    ]);
    assert_eq!(faults.len(), 5, "{faults:#?}");
}

#[test]
fn shortened_settings_of_a_demo_are_accepted() {
    read(&[
        (LEASE, "8s"),
        (FENCE, "3s"),
        (CYCLE, "2s"),
        (RETRY, "500ms"),
        (QUERY_LIMIT, "1s"),
        (BROKER_CALL_LIMIT, "1s"),
        (SEND_RESERVE, "1s"),
        (SETTLE, "0s"),
    ]);
}

#[test]
fn no_password_is_printed_anywhere() {
    for url in [
        "postgres://lockstep:hunter2@db/lockstep",
        "postgres://lockstep:hunt/er2@db/lockstep",
        "postgres://lockstep:hunt?er2@db/lockstep",
        "postgres://lockstep:a@hunter2@db/lockstep",
        "postgres://lockstep@db/lockstep?password=hunter2",
        "postgres://db/lockstep?user=a&password=hunter2@b",
        "hunter2",
    ] {
        let shown = format!("{0} {0:?}", SecretUrl::new(url));
        for part in ["hunter2", "er2", "hunt"] {
            assert!(!shown.contains(part), "{url} is shown as {shown}");
        }
    }
    assert_eq!(SecretUrl::new("nats://s3cr3t@n:4222").to_string(), "nats://***@n:4222");
    let config = read(&[(NATS_URLS, "nats://me:hunter2@n:4222")]);
    assert!(!format!("{config:?} {:?}", config.effective()).contains("hunter2"));
    let bad = faults(&[(DATABASE_URL, "mysql://lockstep:hunter2@db/lockstep")]);
    assert!(!bad.concat().contains("hunter2"), "{bad:?}");
}

#[test]
fn every_setting_is_shown_and_every_default_can_be_given_as_text() {
    let config = read(&[]);
    let shown: Vec<&str> = config.effective().into_iter().map(|(name, _)| name).collect();
    let known: Vec<&str> = SETTINGS.iter().map(|setting| setting.name).collect();
    assert_eq!(shown, known);
    let given: Vec<(&str, &str)> =
        SETTINGS.iter().filter_map(|setting| Some((setting.name, setting.default?))).collect();
    assert_eq!(read(&given), config);
}

#[test]
fn more_threads_that_never_sleep_than_there_are_is_refused() {
    assert_eq!(
        faults(&[(BUSY_POLL, "3")]),
        ["LOCKSTEP_BUSY_POLL must be at most LOCKSTEP_HOT_THREADS: 3 is more than 2"]
    );
    assert_eq!(read(&[(BUSY_POLL, "3"), (HOT_THREADS, "4")]).busy_poll, 3);
    assert_eq!(read(&[]).busy_poll, 0);
}

#[test]
fn threads_for_blocking_calls_are_followers_times_parallel_orders_and_at_most_what_is_allowed() {
    assert_eq!(read(&[]).blocking_threads(), BlockingThreads { wanted: 0, allowed: 0 });
    let some = [(BLOCKING_FOLLOWERS, "30"), (PARALLEL_ORDERS, "27")];
    assert_eq!(read(&some).blocking_threads(), BlockingThreads { wanted: 810, allowed: 810 });
    let few = [(BLOCKING_FOLLOWERS, "30"), (BLOCKING_THREADS_MAX, "100")];
    assert_eq!(read(&few).blocking_threads(), BlockingThreads { wanted: 480, allowed: 100 });
    let faults = faults(&[(BLOCKING_FOLLOWERS, "31"), (CAPACITY, "30")]);
    assert!(faults[0].contains("LOCKSTEP_BLOCKING_FOLLOWERS must be at most LOCKSTEP_CAPACITY"));
    assert!(faults[0].contains("31 is more than 30"), "{faults:?}");
}

#[test]
fn master_keys_come_from_a_file_the_environment_or_a_units_credentials_and_are_never_shown() {
    let key = MasterKey::random().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lockstep-master-key");
    std::fs::write(&file, key.to_line().as_str()).unwrap();
    let file = file.to_str().unwrap();
    let credentials = folder.path().to_str().unwrap();
    for given in [
        (MASTER_KEY_FILE, file),
        (MASTER_KEY, key.to_line().as_str()),
        ("CREDENTIALS_DIRECTORY", credentials),
    ] {
        let config = read(&[given]);
        assert_eq!(config.master_keys.as_ref().unwrap().present().id(), key.id(), "{}", given.0);
        let shown = format!("{config:?} {:?}", config.effective());
        assert!(shown.contains(key.id()) && !shown.contains(&key.to_line()[..10]), "{shown}");
    }
    assert_eq!(read(&[]).master_keys, None);
    assert_eq!(read(&[("CREDENTIALS_DIRECTORY", "/nowhere")]).master_keys, None);
    let both = faults(&[(MASTER_KEY_FILE, file), (MASTER_KEY, key.to_line().as_str())]);
    assert_eq!(
        both,
        ["LOCKSTEP_MASTER_KEY and LOCKSTEP_MASTER_KEY_FILE are both set; one is enough"]
    );
    let wrong = faults(&[(MASTER_KEY, "hunter2")]);
    assert!(wrong[0].starts_with("LOCKSTEP_MASTER_KEY: line 1 must be 64"), "{wrong:?}");
    assert!(!wrong[0].contains("hunter2"));
    let absent = faults(&[(MASTER_KEY_FILE, "/nowhere/key")]);
    assert!(absent[0].starts_with("LOCKSTEP_MASTER_KEY_FILE /nowhere/key: must be a file to read"));
}

#[test]
fn an_address_of_another_kind_is_refused_with_its_value_and_without_its_password() {
    let cases = [
        (DATABASE_URL, "http://me:hunter2@db.example/x", "http://me:***@db.example/x"),
        (
            DATABASE_URL,
            "postgres://me:hunter2@db:port/x",
            "postgres://me:***@db:port/x: invalid port",
        ),
        (DATABASE_URL, "postgres://me:hunter2@db/x?sslmode=shut", "postgres://me:***@db/x: "),
        (
            DATABASE_URL,
            "postgres://me:hunter2@db/x?sslmod=hunter2",
            "parameter \"sslmod\" is not known",
        ),
        (DATABASE_URL, "postgres://me:12?hunter2@db/x", "must be NAME=VALUE"),
        (NATS_URLS, "nats://n1,http://me:hunter2@n2", "http://me:***@n2"),
        (NATS_URLS, "nats://me:hunter2@n2:port", "nats://me:***@n2:port"),
    ];
    for (name, value, shown) in cases {
        let told = faults(&[(name, value)]);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with(name) && told[0].contains(shown), "{told:?} / {shown}");
        assert!(!told[0].contains("hunter2"), "{told:?}");
    }
}
