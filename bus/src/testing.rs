//! Short words for values in this crate's tests.

use schemas::{Book, Epoch, MasterPosition, MasterTicket, Micros, Seq, Side, Symbol};

pub(crate) fn epoch(n: u64) -> Epoch {
    Epoch::new(n).unwrap()
}

pub(crate) fn seq(n: u64) -> Seq {
    Seq::new(n).unwrap()
}

pub(crate) fn ticket(n: u64) -> MasterTicket {
    MasterTicket::new(n).unwrap()
}

pub(crate) fn position(n: u64, lots: &str) -> MasterPosition {
    MasterPosition {
        ticket: ticket(n),
        symbol: Symbol::new("EURUSD").unwrap(),
        side: Side::Buy,
        lots: lots.parse().unwrap(),
        lots_at_open: lots.parse().unwrap(),
        open_price: None,
        stop_loss: None,
        take_profit: None,
        opened_at: Micros(1),
        contract_size: None,
        is_copy: false,
    }
}

pub(crate) fn book_of(tickets: &[u64]) -> Book {
    let positions = tickets.iter().map(|n| (ticket(*n), position(*n, "1"))).collect();
    Book { positions, ..Book::default() }
}
