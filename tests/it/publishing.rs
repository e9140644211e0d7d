//! `lockstep publish`.

use lockstep_tests::master::Master;
use lockstep_tests::world::{World, run_lockstep};
use schemas::AccountId;

#[tokio::test]
async fn a_dry_run_says_what_would_be_played_and_what_the_file_does_not_say() {
    let output = run_lockstep(&["publish", "--history", "demo", "--dry-run"], &[]).await;
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.stdout.contains("trades") && output.stdout.contains("steps"), "{output:?}");
    assert!(output.stdout.contains("not in the file: "), "{output:?}");
}

#[tokio::test]
async fn a_malformed_history_names_file_row_and_column_and_gives_exit_code_two() {
    const HEADER: &str =
        "ticket,open_time,side,lots,symbol,open_price,sl,tp,close_time,close_price,comment\n";
    const GOOD: &str = "1,2025.03.04 09:00:00,buy,0.30,EURUSD,1.05,,,2025.03.04 10:00:00,1.06,\n";
    let folder = std::env::temp_dir().join(format!("it-malformed-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let cases = [
        ("lots.csv", GOOD.replace("0.30", "many"), "row 3", "lots", "many"),
        ("price.csv", GOOD.replace(",1.05,", ",-1,"), "row 3", "open_price", "-1"),
        ("side.csv", GOOD.replace("buy", "hold"), "row 3", "side", "hold"),
        (
            "time.csv",
            GOOD.replace("2025.03.04 09", "2025.13.04 09"),
            "row 3",
            "open_time",
            "2025.13",
        ),
    ];
    let mut wrong = Vec::new();
    for (name, bad, row, column, value) in cases {
        let file = folder.join(name);
        std::fs::write(&file, format!("{HEADER}{GOOD}{}", bad.replacen('1', "2", 1))).unwrap();
        let path = file.to_str().unwrap();
        let output = run_lockstep(&["publish", "--history", path, "--dry-run"], &[]).await;
        let named = [path, row, column, value].iter().all(|word| output.stderr.contains(word));
        if output.code != Some(2) || !named {
            wrong.push(format!("{name}: {output:?}"));
        }
    }
    let missing = folder.join("missing.csv");
    let path = missing.to_str().unwrap();
    let output = run_lockstep(&["publish", "--history", path, "--dry-run"], &[]).await;
    if output.code != Some(2) || !output.stderr.contains(path) {
        wrong.push(format!("{output:?}"));
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let output = run_lockstep(&["publish", "--history", "demo"], &[]).await;
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("--account"), "{output:?}");
}

#[tokio::test]
async fn a_history_is_not_played_over_a_publisher_that_lives() {
    let world = World::start("publish-over").await;
    let bus = world.bus.url(0);
    let _living = Master::start(vec![bus.clone()], AccountId::new(1).unwrap()).await;
    let arguments = ["publish", "--history", "demo", "--account", "1", "--once", "--nats", &bus];
    let output = run_lockstep(&arguments, &[]).await;
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stderr.contains("--account 1: somebody publishes"), "{output:?}");
}
