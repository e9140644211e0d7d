//! A process that holds bare sessions at the broker, and says what they take.

use crate::bench::own_time::resident_kib;
use lockstep::broker::paper::{self as paper_platform, PaperSettings};
use lockstep::clock::NodeClock;
use schemas::{AccountId, NodeId, Token};

/// What the process is told.
#[derive(Debug, Clone, clap::Args)]
pub struct SessionsArgs {
    /// The broker.
    #[arg(long)]
    broker: String,
    /// The first account.
    #[arg(long)]
    first: u64,
    /// How many from there.
    #[arg(long)]
    count: u64,
}

/// Opens a session for each account, and prints the memory of one in KiB.
#[allow(clippy::print_stdout, reason = "what its caller reads")]
pub fn run_sessions(args: &SessionsArgs) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let node = NodeId::new("bare-sessions").unwrap();
        let open = async |account: u64| {
            let login = AccountId::new(account).unwrap();
            let settings = PaperSettings { address: args.broker.clone(), login, blocking: false };
            let token = Token::MIN;
            paper_platform::open(login, &settings, None, &node, token, NodeClock::system())
                .await
                .unwrap()
        };
        // What is made once for all of them.
        let first = open(args.first).await;
        let before = resident_kib(std::process::id());
        let mut sessions = vec![first];
        for account in args.first + 1..args.first + args.count {
            sessions.push(open(account).await);
        }
        let after = resident_kib(std::process::id());
        println!("{}", (after - before) / (args.count - 1) as f64);
        drop(sessions);
    });
}
