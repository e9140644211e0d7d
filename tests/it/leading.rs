//! A leased account that is a master, traded by hand.

use devstack::{FaultMode, FaultProxy};
use lockstep_tests::master::{Master, position};
use lockstep_tests::oracle::{State, assert_clean, logins};
use lockstep_tests::world::{Bus, EURUSD, PRICE, SOON, TAKEOVER, World, until, wall};
use paper::protocol::{FeedQuote, Instruction, OrderReply, Style};
use schemas::{AccountId, FollowerTicket, MasterTicket, OrderDone, PendingKind, Side, Symbol};
use sqlx::Row;
use std::collections::BTreeMap;

/// A person at the master's terminal.
struct Hand<'a> {
    world: &'a World,
    account: AccountId,
}

impl Hand<'_> {
    async fn does(&self, instruction: Instruction) -> OrderDone {
        match self.world.driver.manual(self.account, instruction.clone()).await.unwrap() {
            OrderReply::Done(done) => done,
            OrderReply::Rejected(rejection) => panic!("{instruction:?}: {rejection:?}"),
        }
    }

    async fn opens(&self, side: Side, lots: &str) -> FollowerTicket {
        let symbol = Symbol::new(EURUSD).unwrap();
        let open = Instruction::open_by_hand(symbol, side, lots.parse().unwrap());
        self.does(open).await.ticket
    }

    /// Closes a part; the rest has the number that is returned.
    async fn closes_part(&self, ticket: FollowerTicket, lots: &str) -> FollowerTicket {
        let lots = Some(lots.parse().unwrap());
        let done = self.does(Instruction::Close { ticket, lots }).await;
        done.remainder.expect("a broker in MT4 style gives the rest a new number")
    }

    async fn closes(&self, ticket: FollowerTicket) {
        self.does(Instruction::Close { ticket, lots: None }).await;
    }

    async fn sets_stops(&self, ticket: FollowerTicket, stop_loss: &str, take_profit: &str) {
        let stop_loss = Some(stop_loss.parse().unwrap());
        let take_profit = Some(take_profit.parse().unwrap());
        self.does(Instruction::Modify { ticket, stop_loss, take_profit }).await;
    }

    async fn places(&self, kind: PendingKind, lots: &str, price: &str) -> FollowerTicket {
        let place = Instruction::Place {
            symbol: Symbol::new(EURUSD).unwrap(),
            kind,
            lots: lots.parse().unwrap(),
            price: price.parse().unwrap(),
            stop_loss: None,
            take_profit: None,
            magic: 0,
            comment: String::new(),
        };
        self.does(place).await.ticket
    }

    /// The followers hold what the master holds.
    async fn is_followed(&self, step: &str) -> paper::Ledger {
        let state = |ledger: &paper::Ledger| State::of_account(ledger, self.account);
        let limit = if step.starts_with("after the kill") { TAKEOVER } else { SOON };
        self.world.until_equal(limit, state).await
    }
}

async fn quote(world: &World, price: &str) {
    let price = price.parse().unwrap();
    let quote = FeedQuote { symbol: Symbol::new(EURUSD).unwrap(), bid: price, ask: price };
    world.driver.feed(vec![quote]).await.unwrap();
}

async fn epoch(world: &World, account: AccountId) -> i64 {
    sqlx::query("select epoch_max from trading_accounts where id = $1")
        .bind(account.as_i64())
        .fetch_one(&mut world.database().await)
        .await
        .unwrap()
        .get("epoch_max")
}

#[tokio::test]
async fn a_leased_master_publishes_its_trades_and_another_node_leads_it_after_a_kill() {
    let mut world = World::start("leading").await;
    let account = world.add_paper_account("master", Style::Mt4).await;
    let of_mt4 = world.add_paper_account("follower-mt4", Style::Mt4).await;
    let of_mt5 = world.add_paper_account("follower-mt5", Style::Mt5).await;
    world.add_link(account, of_mt4, 1).await;
    world.add_link(account, of_mt5, 2).await;
    let a = world.node("a").setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    let b = world.node("b").setting("LOCKSTEP_CLAIM_BATCH", 1).start();
    world.until_session("leading", &[account]).await;
    world.until_copying().await;
    let hand = Hand { world: &world, account };

    let long = hand.opens(Side::Buy, "1.00").await;
    let short = hand.opens(Side::Sell, "0.50").await;
    hand.is_followed("two opens").await;
    hand.sets_stops(long, "1.05000", "1.20000").await;
    hand.is_followed("stops").await;
    let long = hand.closes_part(long, "0.40").await;
    hand.is_followed("a part closed").await;
    hand.sets_stops(long, "1.06000", "1.19000").await;
    hand.is_followed("stops of the rest").await;
    let long = hand.closes_part(long, "0.25").await;
    hand.is_followed("another part closed").await;

    let limit = hand.places(PendingKind::BuyLimit, "0.30", "1.07000").await;
    let stop = hand.places(PendingKind::BuyStop, "0.20", "1.10500").await;
    hand.is_followed("two pending orders").await;
    hand.does(Instruction::ModifyPending {
        ticket: limit,
        price: "1.08000".parse().unwrap(),
        stop_loss: Some("1.04000".parse().unwrap()),
        take_profit: None,
    })
    .await;
    hand.is_followed("a pending order changed").await;
    hand.does(Instruction::Cancel { ticket: limit }).await;
    hand.is_followed("a pending order deleted").await;
    quote(&world, "1.10600").await;
    quote(&world, PRICE).await;
    let ledger = hand.is_followed("a pending order filled").await;
    let filled = State::of_account(&ledger, account);
    assert!(filled.trades.contains_key(&stop.get()) && filled.waiting.is_empty(), "{filled:?}");
    hand.closes(short).await;
    hand.is_followed("a close").await;

    let epoch_before = epoch(&world, account).await;
    let (leader, other) =
        if world.owned_by(&a).await.contains_key(&account) { (a, b) } else { (b, a) };
    leader.process.kill().unwrap();
    let unled = hand.opens(Side::Buy, "0.10").await;
    hand.closes(stop).await;
    until("the other node owns the master", TAKEOVER, async || {
        world.owned_by(&other).await.contains_key(&account).then_some(())
    })
    .await;
    hand.is_followed("after the kill").await;
    world.until_session("leading", &[account]).await;
    let epoch_after = epoch(&world, account).await;
    assert!(epoch_after > epoch_before, "{epoch_after} is not above {epoch_before}");
    hand.opens(Side::Sell, "0.70").await;
    let _rest = hand.closes_part(long, "0.10").await;
    hand.closes(unled).await;
    let ledger = hand.is_followed("after the kill, led again").await;
    assert_clean(&ledger);
}

// An account may copy as well as lead: being outbid on the bus is no reason to stop copying.
#[tokio::test]
async fn a_master_that_is_outbid_leads_again_and_its_own_copying_goes_on() {
    let mut world = World::start("outbid").await;
    let source = world.add_external_account("source").await;
    let middle = world.add_paper_account("middle", Style::Mt5).await;
    let last = world.add_paper_account("last", Style::Mt5).await;
    world.add_link(source, middle, 1).await;
    world.add_link(middle, last, 1).await;
    let mut first = Master::start(vec![world.bus.url(0)], source).await;
    let _node = world.node("a").start();
    world.until_copying().await;
    let hand = Hand { world: &world, account: middle };
    hand.opens(Side::Buy, "1.00").await;
    let held = async |account, count| {
        until("the copies", SOON, async || {
            let state = State::of_account(&world.ledger().await, account);
            (state.trades.len() == count).then_some(())
        })
        .await;
    };
    held(last, 1).await;

    // The same trade, so that its followers have no reason to close anything meanwhile.
    let open = State::of_account(&world.ledger().await, middle);
    let ticket = *open.trades.keys().next().unwrap();
    let mut rival = Master::start(vec![world.bus.url(0)], middle).await;
    let position = position(MasterTicket::new(ticket).unwrap(), "1.00".parse().unwrap(), wall());
    rival.book.positions.insert(position.ticket, position);
    rival.handle.observe(wall(), rival.book.clone(), &BTreeMap::new());
    until("the node outbids it", SOON, async || {
        let status = *rival.handle.status().borrow();
        matches!(status, bus::PublisherStatus::Superseded { .. }).then_some(())
    })
    .await;
    let own = hand.opens(Side::Sell, "0.50").await;
    held(last, 2).await;
    first.open("0.30");
    held(middle, 3).await;
    hand.closes(own).await;
    held(last, 1).await;
    let ledger = world.ledger().await;
    assert_clean(&ledger);
    let logins: Vec<_> = logins(&ledger).into_iter().filter(|(of, ..)| *of == middle).collect();
    assert_eq!(logins.len(), 1, "its session was cut: {logins:?}");
}

// The events go to the bus as well, which keeps them back here and brings them later.
#[tokio::test]
async fn a_follower_hears_a_master_of_its_own_node_while_the_bus_stands_still() {
    let mut world = World::start("local-path").await;
    let account = world.add_paper_account("master", Style::Mt5).await;
    world.add_followers(account, 2).await;
    let Bus::One(nats) = &world.bus else { panic!("one server") };
    let proxy = FaultProxy::start(nats.addr()).await.unwrap();
    let _node = world.node("a").nats(format!("nats://{}", proxy.addr())).start();
    world.until_session("leading", &[account]).await;
    world.until_copying().await;
    let hand = Hand { world: &world, account };
    let first = hand.opens(Side::Buy, "0.10").await;
    hand.is_followed("an open").await;

    proxy.set_mode(FaultMode::BlackHole).await.unwrap();
    hand.opens(Side::Sell, "0.20").await;
    hand.closes(first).await;
    hand.is_followed("an open and a close without the bus").await;

    proxy.set_mode(FaultMode::Pass).await.unwrap();
    hand.opens(Side::Buy, "0.30").await;
    let ledger = hand.is_followed("an open with the bus").await;
    assert_clean(&ledger);
}
