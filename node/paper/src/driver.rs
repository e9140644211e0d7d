//! The other end of a test or a demo: declares the world, moves prices, reads the ledger.
//!
//! Decides nothing; one method a request. Pages are put together here, so a list is complete or
//! an error. Each method waits at most `client::CALL_LIMIT` a page.

use crate::client::{Ident, PaperClient};
use crate::error::PaperError;
use crate::faults::{Fault, FaultSpec, Settings, SettingsChange};
use crate::ledger::Ledger;
use crate::protocol::{
    AccountBook, AccountDecl, AccountsPage, BooksPage, Ended, FeedQuote, Instruction, LedgerPage,
    LoginKind, Op, OrderReply, Request, StoppedOut,
};
use schemas::{AccountId, FollowerTicket, Money, SymbolSpec};
use serde::de::{DeserializeOwned, IgnoredAny};

/// A driver or auditor connection.
#[derive(Debug, Clone)]
pub struct PaperDriver {
    client: PaperClient,
}

impl PaperDriver {
    /// Connects and logs in without an account. `kind` is `Driver` or `Auditor`.
    pub async fn connect(addr: &str, ident: Ident, kind: LoginKind) -> Result<Self, PaperError> {
        let client = PaperClient::connect(addr, ident).await?;
        let node = client.node().clone();
        let driver = Self { client };
        let login = Op::Login { account: None, node, kind, token: None, password: None };
        driver.call::<IgnoredAny>("login", login).await?;
        Ok(driver)
    }

    /// New accounts; one that exists is fine if it is declared the same.
    pub async fn declare_accounts(&self, accounts: Vec<AccountDecl>) -> Result<(), PaperError> {
        self.call::<IgnoredAny>("declare_accounts", Op::DeclareAccounts { accounts })
            .await
            .map(drop)
    }

    /// New symbols, without suffix; one that exists is fine if it is declared the same.
    pub async fn declare_symbols(&self, symbols: Vec<SymbolSpec>) -> Result<(), PaperError> {
        self.call::<IgnoredAny>("declare_symbols", Op::DeclareSymbols { symbols }).await.map(drop)
    }

    /// New prices. When this returns, everything they trigger has happened.
    pub async fn feed(&self, quotes: Vec<FeedQuote>) -> Result<(), PaperError> {
        self.call::<IgnoredAny>("feed", Op::Feed { quotes }).await.map(drop)
    }

    /// Trades as a person at the terminal would: no token, magic 0 unless given; answered at once.
    pub async fn manual(
        &self,
        account: AccountId,
        instruction: Instruction,
    ) -> Result<OrderReply, PaperError> {
        self.client.call("manual", &Request::Manual { account, instruction }).await
    }

    /// Money in, or out if negative.
    pub async fn deposit(&self, account: AccountId, amount: Money) -> Result<(), PaperError> {
        self.call::<IgnoredAny>("deposit", Op::Deposit { account, amount }).await.map(drop)
    }

    /// Changes what is given and returns what holds.
    pub async fn settings(&self, change: SettingsChange) -> Result<Settings, PaperError> {
        let SettingsChange { answer_delay_ms, check_tokens } = change;
        self.call("settings", Op::Settings { answer_delay_ms, check_tokens }).await
    }

    /// Sets one more fault.
    pub async fn set_fault(&self, fault: FaultSpec) -> Result<Fault, PaperError> {
        self.call("fault_set", Op::FaultSet { fault }).await
    }

    /// The faults that are set.
    pub async fn faults(&self) -> Result<Vec<Fault>, PaperError> {
        self.call("fault_list", Op::FaultList {}).await
    }

    /// Takes faults away: one, those of an account, or all; returns what was taken away.
    pub async fn clear_faults(
        &self,
        fault: Option<u64>,
        account: Option<AccountId>,
    ) -> Result<Vec<Fault>, PaperError> {
        self.call("fault_clear", Op::FaultClear { fault, account }).await
    }

    /// Ends every trader's session of an account; returns how many there were.
    pub async fn kick(&self, account: AccountId) -> Result<usize, PaperError> {
        let ended: Ended = self.call("kick", Op::Kick { account }).await?;
        Ok(ended.sessions)
    }

    /// Sets the stop-out level of an account in percent, or takes it away.
    pub async fn set_stop_out(
        &self,
        account: AccountId,
        percent: Option<u32>,
    ) -> Result<(), PaperError> {
        let op = Op::StopOutLevel { account, percent };
        self.call::<IgnoredAny>("stop_out_level", op).await.map(drop)
    }

    /// Closes the trade with the largest loss as a stop-out does; returns its ticket.
    pub async fn stop_out(&self, account: AccountId) -> Result<FollowerTicket, PaperError> {
        let stopped: StoppedOut = self.call("stop_out", Op::StopOut { account }).await?;
        Ok(stopped.ticket)
    }

    /// Every account.
    pub async fn accounts(&self) -> Result<Vec<AccountDecl>, PaperError> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page: AccountsPage = self.call("accounts", Op::Accounts { after }).await?;
            all.extend(page.accounts);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// Every account with what it holds. Each is consistent in itself; with more than
    /// `PAGE_ACCOUNTS_MAX` accounts the pages are from different instants.
    pub async fn books(&self) -> Result<Vec<AccountBook>, PaperError> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page: BooksPage = self.call("books", Op::Books { after }).await?;
            all.extend(page.books);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(all),
            }
        }
    }

    /// What one account holds.
    pub async fn book(&self, account: AccountId) -> Result<AccountBook, PaperError> {
        self.call("snapshot", Op::Snapshot { account }).await
    }

    /// The whole ledger up to now.
    pub async fn ledger(&self) -> Result<Ledger, PaperError> {
        let (mut rows, mut from) = (Vec::new(), 0);
        loop {
            let page = self.ledger_page(from).await?;
            rows.extend(page.rows);
            match page.next {
                Some(next) => from = next,
                None => return Ok(Ledger::from_rows(rows)),
            }
        }
    }

    /// A page of the ledger, for those who follow it while it grows.
    pub async fn ledger_page(&self, from: u64) -> Result<LedgerPage, PaperError> {
        self.call("ledger", Op::Ledger { from }).await
    }

    async fn call<T: DeserializeOwned>(&self, name: &'static str, op: Op) -> Result<T, PaperError> {
        self.client.call(name, &Request::Other(op)).await
    }
}
