//! The other end of a test or a demo: declares the world, moves prices, reads the ledger.
//!
//! Decides nothing; one method a request. Pages are put together here, so a list is complete or
//! an error. Each method waits at most `client::CALL_LIMIT` a page.

use crate::client::{Ident, PaperClient};
use crate::error::PaperError;
use crate::faults::{Settings, SettingsChange};
use crate::ledger::Ledger;
use crate::protocol::{
    AccountBook, AccountDecl, AccountsPage, BooksPage, FeedQuote, Instruction, LedgerPage,
    LoginKind, Op, OrderReply, Request,
};
use schemas::{AccountId, Money, SymbolSpec};
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
        let login = Op::Login { account: None, node, kind, token: None };
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
