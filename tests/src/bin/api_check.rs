//! `./run check api`: the API of a node that runs, asked at random by somebody who has read nothing but
//! its description.
//!
//! In: the folder that schemathesis was put into. Out: what it says, and its exit code. A 503 is no
//! fault: it is described, and says why.

#![allow(clippy::unwrap_used, reason = "a check: a panic is how it says no")]

use lockstep::api::tokens::{self, Scope};
use lockstep_tests::http::Client;
use lockstep_tests::master::Master;
use lockstep_tests::oracle::State;
use lockstep_tests::world::{SOON, World};
use paper::protocol::Style;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tokio::process::Command;

/// The longest that it may take.
const LIMIT: Duration = Duration::from_secs(300);
/// Requests of each kind.
const EXAMPLES: &str = "40";
/// What is asked is the same each time.
const SEED: &str = "1";

#[tokio::main]
async fn main() -> ExitCode {
    let folder = std::env::args().nth(1).expect("the folder of schemathesis");
    let mut world = World::start("api-check").await;
    let boss = world.add_external_account("boss").await;
    let follower = world.add_paper_account("follower", Style::Mt5).await;
    world.add_link(boss, follower, 1).await;
    let mut master = Master::start(vec![world.bus.url(0)], boss).await;
    let client = Client::free().await;
    let _node = world.node("a").setting("LOCKSTEP_API_LISTEN", client.address()).start();
    client.until_there().await;
    world.until_copying().await;
    let tickets = master.open_many(20, "0.10");
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    master.close_many(&tickets[..5]);
    world.until_equal(SOON, |_| State::of_book(&master.book)).await;
    let mut db = world.database().await;
    let (_, token) = tokens::add(&mut db, "fuzzer", Scope::Admin, 1).await.unwrap();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut fuzzer = Command::new("python3");
    fuzzer
        .args(["-m", "schemathesis.cli"])
        .arg("--config-file")
        .arg(tests.join("schemathesis.toml"))
        .args(["run", "--url", &format!("http://{}", client.address())])
        .args(["--max-examples", EXAMPLES, "--seed", SEED, "--no-color"])
        .args(["--header", &format!("Authorization: Bearer {}", token.expose())])
        .arg(tests.join("../node/openapi.json"))
        .env("PYTHONPATH", &folder)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(std::env::temp_dir())
        .kill_on_drop(true);
    let done = tokio::time::timeout(LIMIT, fuzzer.status()).await.expect("it ends").unwrap();
    if done.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
