//! A broker with a driver, and its users: nodes and a person with nc.
#![allow(dead_code, reason = "each test program uses its part")]

use lockstep_paper as paper;
use paper::faults::Settings;
use paper::protocol::{
    AccountChange, AccountDecl, FeedQuote, Instruction, LoginKind, OrderReply, Style,
};
use paper::{
    Ident, OrderOutcome, PaperClient, PaperConfig, PaperDriver, PaperError, PaperServer,
    PaperSession, SendMeta, SessionPush,
};
use schemas::{
    AccountId, AccountSnapshot, FollowerTicket, Lots, Magic, Micros, OrderDone, OrderRequest, Side,
    SymbolSpec, Token,
};
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

/// Longest wait for anything that must happen.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Broker {
    pub(crate) addr: String,
    pub(crate) driver: PaperDriver,
    stop: Option<oneshot::Sender<()>>,
    serving: tokio::task::JoinHandle<Result<(), PaperError>>,
}

pub(crate) fn account(number: u64) -> AccountId {
    AccountId::new(number).unwrap()
}

pub(crate) fn ident(name: &str) -> Ident {
    Ident { node: name.parse().unwrap() }
}

pub(crate) fn lots(text: &str) -> Lots {
    text.parse().unwrap()
}

pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen within {LIMIT:?}"),
    }
}

pub(crate) fn config(ledger_path: Option<PathBuf>, answer_delay_ms: u64) -> PaperConfig {
    let settings = Settings { answer_delay_ms, check_tokens: false };
    PaperConfig { listen: "127.0.0.1:0".parse().unwrap(), ledger_path, settings, seed: 1 }
}

impl Broker {
    pub(crate) async fn start(config: PaperConfig) -> Broker {
        let server = PaperServer::bind(config).await.unwrap();
        let addr = server.local_addr().to_string();
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(server.serve(async {
            let _ = stopped.await;
        }));
        let driver = PaperDriver::connect(&addr, ident("driver"), LoginKind::Driver).await.unwrap();
        let spec = SymbolSpec {
            symbol: "EURUSD".parse().unwrap(),
            digits: 5,
            lots_step: lots("0.01"),
            lots_min: lots("0.01"),
            lots_max: lots("50"),
            contract_size: Some("100000".parse().unwrap()),
            stops_level_points: 0,
        };
        driver.declare_symbols(vec![spec]).await.unwrap();
        let decls = [(1, Style::Mt5), (2, Style::Mt4)];
        let decls = decls.map(|(number, style)| AccountDecl::new(account(number), style));
        driver.declare_accounts(decls.to_vec()).await.unwrap();
        let broker = Broker { addr, driver, stop: Some(stop), serving };
        broker.feed("1.10000", "1.10010").await;
        broker
    }

    pub(crate) async fn quick() -> Broker {
        Broker::start(config(None, 0)).await
    }

    pub(crate) async fn feed(&self, bid: &str, ask: &str) {
        let symbol = "EURUSD".parse().unwrap();
        let quote = FeedQuote { symbol, bid: bid.parse().unwrap(), ask: ask.parse().unwrap() };
        self.driver.feed(vec![quote]).await.unwrap();
    }

    pub(crate) async fn client(&self, name: &str) -> PaperClient {
        PaperClient::connect(&self.addr, ident(name)).await.unwrap()
    }

    pub(crate) async fn open_by_hand(&self, number: u64, volume: &str) -> FollowerTicket {
        let symbol = "EURUSD".parse().unwrap();
        let order = Instruction::open_by_hand(symbol, Side::Buy, lots(volume));
        match self.driver.manual(account(number), order).await.unwrap() {
            OrderReply::Done(done) => done.ticket,
            OrderReply::Rejected(rejection) => panic!("{rejection:?}"),
        }
    }

    pub(crate) async fn stop(mut self) -> Result<(), PaperError> {
        let _ = self.stop.take().unwrap().send(());
        soon("the end of the broker", self.serving).await.unwrap()
    }

    pub(crate) async fn raw(&self) -> Raw {
        let stream = TcpStream::connect(&self.addr).await.unwrap();
        Raw { stream: BufReader::new(stream) }
    }
}

/// A person with nc.
pub(crate) struct Raw {
    pub(crate) stream: BufReader<TcpStream>,
}

impl Raw {
    pub(crate) async fn say(&mut self, line: &str) {
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    pub(crate) async fn hear(&mut self) -> Value {
        let mut line = String::new();
        let read = soon("a line of the broker", self.stream.read_line(&mut line)).await.unwrap();
        assert!(read > 0, "the broker closed the connection");
        serde_json::from_str(&line).unwrap()
    }

    pub(crate) async fn ask(&mut self, line: &str) -> Value {
        self.say(line).await;
        self.hear().await
    }
}

pub(crate) fn open(comment: &str) -> OrderRequest {
    OrderRequest::Open {
        symbol: "EURUSD".parse().unwrap(),
        side: Side::Buy,
        lots: lots("1.00"),
        stop_loss: None,
        take_profit: None,
        magic: Magic::new(77).unwrap(),
        comment: comment.to_owned(),
    }
}

pub(crate) fn meta(token: u64, deadline_margin_us: i64) -> SendMeta {
    let token = Token::new(token).unwrap();
    SendMeta { token, deadline_margin_us, sent_at: Micros(5), client_ref: 9 }
}

pub(crate) async fn session(
    client: &PaperClient,
    number: u64,
) -> (PaperSession, mpsc::Receiver<SessionPush>, AccountSnapshot) {
    let (session, mut pushes) =
        client.open_account(account(number), Token::new(1).unwrap()).await.unwrap();
    match soon("the sync mark", pushes.recv()).await {
        Some(SessionPush::Synced(snapshot)) => (session, pushes, snapshot),
        other => panic!("the first push must be the state, got {other:?}"),
    }
}

pub(crate) async fn done(session: &PaperSession, request: &OrderRequest) -> OrderDone {
    match soon("an answer", session.order(request, meta(1, 1_000))).await {
        OrderOutcome::Done(done) => done,
        other => panic!("{request:?}: {other:?}"),
    }
}

pub(crate) async fn change(pushes: &mut mpsc::Receiver<SessionPush>) -> (u64, AccountChange) {
    match soon("a change", pushes.recv()).await {
        Some(SessionPush::Change { revision, change, .. }) => (revision, change),
        other => panic!("expected a change, got {other:?}"),
    }
}
