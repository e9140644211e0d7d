//! The desk and the margin: what an order needs free, and what a stop-out closes.
//!
//! Only accounts with a stop-out level are looked at. Of their trades the largest loss goes first,
//! and no more than needed.

use crate::desk::{Desk, refuse};
use crate::engine::{OpenTrade, profit};
use rust_decimal::Decimal;
use schemas::{FollowerTicket, Lots, Price, RejectClass, Rejection, Side, Symbol, SymbolSpec};

impl Desk<'_> {
    /// Where the account has a stop-out level, an order needs its margin free.
    pub(crate) fn check_margin(
        &self,
        spec: &SymbolSpec,
        base: &Symbol,
        side: Side,
        lots: Lots,
        price: Price,
    ) -> Result<(), Rejection> {
        if self.account.stop_out_percent.is_none() {
            return Ok(());
        }
        if self.netted(base).is_some_and(|trade| trade.position.side != side) {
            return Ok(());
        }
        let needed = self.account.margin_of(Some(spec), lots.get(), price);
        let equity = self.account.funds(self.symbols, self.now).equity.get();
        let free = equity - self.account.margin_used(self.symbols);
        if needed > free {
            return refuse(RejectClass::NoMoney, format!("needs {needed}, {free} is free"));
        }
        Ok(())
    }

    /// Closes trades while equity is below the stop-out level of the margin in use.
    pub(crate) fn stop_out_if_due(&mut self) {
        let Some(percent) = self.account.stop_out_percent else { return };
        let level = Decimal::from(percent);
        loop {
            let equity = self.account.funds(self.symbols, self.now).equity.get();
            let used = self.account.margin_used(self.symbols);
            let is_due = equity * Decimal::ONE_HUNDRED < used * level;
            if !is_due || self.close_largest_loss().is_none() {
                return;
            }
        }
    }

    /// Of equal losses the lowest ticket goes first. Absent: nothing that is open has a price.
    pub(crate) fn close_largest_loss(&mut self) -> Option<FollowerTicket> {
        let value = |trade: &OpenTrade| {
            let listed = &self.symbols[&trade.base];
            let price = listed.closing_price(trade.position.side)?;
            let lots = trade.position.lots.get();
            Some((profit(&listed.spec, &trade.position, lots, price), price, trade.clone()))
        };
        let (_, price, trade) =
            self.account.trades.values().filter_map(value).min_by_key(|(profit, ..)| *profit)?;
        let ticket = trade.position.ticket;
        self.close_whole(trade, price);
        Some(ticket)
    }
}
