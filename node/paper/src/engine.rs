//! The broker without a network: accounts, symbols, prices, and what follows from a request.
//!
//! Decides whether a login, a declaration, a price or an order is taken, and what it changes.
//! Inputs: the state, one request, `now`. Outputs: the reply, and `Effects` for the shell.
//!
//! Invariants:
//! 1. A refused order changes nothing: no ticket is used up, no revision counted.
//! 2. Each change of an account raises its revision by one and makes one `Push::Change`.
//! 3. Tickets grow over the whole broker and are never used twice; a pending order that fills
//!    keeps its ticket.
//! 4. The same requests at the same times give the same effects: nothing iterates in hash order.
//!
//! Not modelled: swap and commission, currency conversion (profit is price difference x contract
//! size x lots, margin is lots x contract size x opening price / leverage, both booked as if they
//! were in the account's currency), expiry of pending orders, freeze levels, liquidity (an order
//! fills in full at the quote unless a fault says otherwise).

use crate::clock::Now;
use crate::desk::Desk;
use crate::faults::{CommentFault, Settings, Verdict};
use crate::ledger::{Cause, TradeFact};
use crate::protocol::{
    AccountBook, AccountChange, AccountDecl, AccountsPage, BooksPage, FeedQuote, FieldError,
    HistoryPage, Instruction, LEVERAGE_MAX, OrderMeta, OrderReply, PAGE_ACCOUNTS_MAX,
    PAGE_ROWS_MAX, Password, Push, STOP_OUT_PERCENT_MAX, Style,
};
use rust_decimal::Decimal;
use schemas::{
    AccountId, BrokerPending, BrokerPosition, ClosedTrade, FollowerTicket, Funds, Micros, Money,
    Price, Quote, RejectClass, Rejection, Side, Symbol, SymbolSpec, Token,
};
use std::collections::{BTreeMap, BTreeSet};

/// Most accounts of one broker.
pub const ACCOUNTS_MAX: usize = 100_000;
/// Most symbols of one broker.
pub const SYMBOLS_MAX: usize = 10_000;
/// Most trades plus pending orders of one account; past it an opening order is refused.
pub const HELD_PER_ACCOUNT_MAX: usize = 10_000;
/// A page of books ends after the account that reaches this many trades and pending orders.
pub const PAGE_HELD_MAX: usize = 5_000;
/// Longest symbol without suffix, and longest suffix; together they fit a symbol.
const SYMBOL_CHARS_MAX: usize = 48;
const SUFFIX_CHARS_MAX: usize = 16;
/// Tickets start above this, so that they are not mistaken for counts or indices.
const TICKETS_START: u64 = 1_000_000;
/// Digits of an amount in the account's currency.
const MONEY_DIGITS: u32 = 2;
/// Largest amount that `Money` can hold.
const MONEY_MAX: i64 = 1_000_000_000_000_000;

/// What the shell has to tell and to write down after a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effects {
    /// Changes of accounts, in order.
    pub changes: Vec<(AccountId, Push)>,
    /// New prices, without suffix.
    pub quotes: Vec<Quote>,
    /// For the ledger, in order.
    pub trades: Vec<TradeFact>,
}

/// The whole state of the broker.
#[derive(Debug, Clone)]
pub struct Engine {
    accounts: BTreeMap<AccountId, Account>,
    symbols: BTreeMap<Symbol, Listed>,
    last_ticket: u64,
    /// Accounts with a stop-out level.
    stop_outs: BTreeSet<AccountId>,
}

/// What an order is decided on, besides the state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Terms {
    /// What holds for every order.
    pub settings: Settings,
    /// What a fault makes of it.
    pub verdict: Verdict,
    /// What a fault makes of its comment.
    pub comment: Option<CommentFault>,
}

/// A symbol with its last price.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) spec: SymbolSpec,
    pub(crate) quote: Option<Quote>,
    /// What a new price may trigger: pending orders, and trades with stops.
    pub(crate) watched: BTreeSet<(AccountId, FollowerTicket)>,
}

/// An open trade, and what the broker knows of it besides what it shows.
#[derive(Debug, Clone)]
pub(crate) struct OpenTrade {
    pub(crate) position: BrokerPosition,
    pub(crate) base: Symbol,
    pub(crate) first_ticket: FollowerTicket,
    pub(crate) comment_sent: String,
}

/// A pending order, and what the broker knows of it besides what it shows.
#[derive(Debug, Clone)]
pub(crate) struct WaitingOrder {
    pub(crate) pending: BrokerPending,
    pub(crate) base: Symbol,
    pub(crate) comment_sent: String,
}

/// One account.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    pub(crate) decl: AccountDecl,
    pub(crate) balance: Decimal,
    pub(crate) revision: u64,
    pub(crate) token_highest: Token,
    /// Now; the declaration says it for the start.
    pub(crate) stop_out_percent: Option<u32>,
    pub(crate) trades: BTreeMap<FollowerTicket, OpenTrade>,
    pub(crate) waiting: BTreeMap<FollowerTicket, WaitingOrder>,
    pub(crate) history: Vec<ClosedTrade>,
    /// Tickets that were closed, cancelled or renumbered.
    pub(crate) gone: BTreeSet<FollowerTicket>,
}

pub(crate) type Symbols = BTreeMap<Symbol, Listed>;

impl Account {
    fn new(decl: AccountDecl) -> Self {
        Self {
            balance: decl.balance.get(),
            stop_out_percent: decl.stop_out_percent,
            decl,
            revision: 0,
            token_highest: Token::MIN,
            trades: BTreeMap::new(),
            waiting: BTreeMap::new(),
            history: Vec::new(),
            gone: BTreeSet::new(),
        }
    }

    /// A symbol as this account's group prints it.
    pub(crate) fn shown(&self, base: &Symbol) -> Symbol {
        Symbol::new(format!("{base}{}", self.decl.suffix))
            .expect("lengths and characters were checked when symbol and suffix were declared")
    }

    /// Balance, and balance plus what the open trades would bring at the last prices.
    pub(crate) fn funds(&self, symbols: &Symbols, now: Now) -> Funds {
        let mut equity = self.balance;
        for trade in self.trades.values() {
            let Some(listed) = symbols.get(&trade.base) else { continue };
            let Some(price) = listed.closing_price(trade.position.side) else { continue };
            equity = add_money(equity, trade.profit_at(&listed.spec, price));
        }
        Funds {
            balance: money(self.balance),
            equity: money(equity),
            margin_used: Some(money(self.margin_used(symbols))),
            currency: self.decl.currency.clone(),
            at: now.wall,
        }
    }

    /// Margin that the open trades take; 0 exactly when there are none.
    pub(crate) fn margin_used(&self, symbols: &Symbols) -> Decimal {
        let of = |trade: &OpenTrade| {
            let position = &trade.position;
            let spec = symbols.get(&trade.base).map(|listed| &listed.spec);
            self.margin_of(spec, position.lots.get(), position.open_price)
        };
        self.trades.values().map(of).fold(Decimal::ZERO, add_money)
    }

    /// Margin of a trade: at least the smallest amount, so that no trade takes none.
    pub(crate) fn margin_of(
        &self,
        spec: Option<&SymbolSpec>,
        lots: Decimal,
        price: Price,
    ) -> Decimal {
        let size = spec.and_then(|spec| spec.contract_size).unwrap_or(Decimal::ONE);
        let value = size.checked_mul(lots).and_then(|units| units.checked_mul(price.get()));
        let margin = value.map(|value| value / Decimal::from(self.decl.leverage_used()));
        let (least, largest) = (Decimal::new(1, MONEY_DIGITS), Decimal::from(MONEY_MAX));
        margin.unwrap_or(largest).round_dp(MONEY_DIGITS).clamp(least, largest)
    }

    fn book(&self, symbols: &Symbols, now: Now) -> AccountBook {
        AccountBook {
            account: self.decl.account,
            revision: self.revision,
            positions: self.trades.values().map(|t| t.position.clone()).collect(),
            pendings: self.waiting.values().map(|w| w.pending.clone()).collect(),
            funds: self.funds(symbols, now),
            complete: true,
        }
    }
}

impl Listed {
    /// What a trade of this direction can be closed at.
    pub(crate) fn closing_price(&self, side: Side) -> Option<Price> {
        self.quote.as_ref().map(|quote| match side {
            Side::Buy => quote.bid,
            Side::Sell => quote.ask,
        })
    }

    /// What a trade of this direction can be opened at.
    pub(crate) fn opening_price(&self, side: Side) -> Option<Price> {
        self.closing_price(side.opposite())
    }
}

impl OpenTrade {
    fn profit_at(&self, spec: &SymbolSpec, price: Price) -> Decimal {
        profit(spec, &self.position, self.position.lots.get(), price)
    }
}

/// What closing `lots` of a trade at `price` brings, in the quote currency.
pub(crate) fn profit(
    spec: &SymbolSpec,
    position: &BrokerPosition,
    lots: Decimal,
    price: Price,
) -> Decimal {
    let difference = match position.side {
        Side::Buy => price.get() - position.open_price.get(),
        Side::Sell => position.open_price.get() - price.get(),
    };
    let units = spec.contract_size.unwrap_or(Decimal::ONE).checked_mul(lots);
    let amount = units.and_then(|units| units.checked_mul(difference));
    let largest = Decimal::from(MONEY_MAX);
    let bound = if difference.is_sign_negative() { -largest } else { largest };
    amount.unwrap_or(bound).clamp(-largest, largest).round_dp(MONEY_DIGITS)
}

/// Adds amounts, staying inside what `Money` can hold.
pub(crate) fn add_money(a: Decimal, b: Decimal) -> Decimal {
    let largest = Decimal::from(MONEY_MAX);
    (a + b).clamp(-largest, largest)
}

fn check_stop_out_percent(field: &str, percent: Option<u32>) -> Result<(), FieldError> {
    match percent {
        Some(percent) if percent == 0 || percent > STOP_OUT_PERCENT_MAX => {
            let text = format!("must be 1 to {STOP_OUT_PERCENT_MAX}");
            Err(FieldError::new(field, percent, text))
        }
        _ => Ok(()),
    }
}

fn money(amount: Decimal) -> Money {
    Money::new(amount.round_dp(MONEY_DIGITS)).expect("amounts are kept inside the range")
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            accounts: BTreeMap::new(),
            symbols: BTreeMap::new(),
            last_ticket: TICKETS_START,
            stop_outs: BTreeSet::new(),
        }
    }
}

impl Engine {
    /// Adds accounts; all of them or none.
    pub fn declare_accounts(&mut self, decls: Vec<AccountDecl>) -> Result<(), FieldError> {
        for (index, decl) in decls.iter().enumerate() {
            let at = |name: &str| format!("accounts[{index}].{name}");
            let suffix_ok = decl.suffix.len() <= SUFFIX_CHARS_MAX
                && Symbol::new(format!("X{}", decl.suffix)).is_ok();
            if !suffix_ok {
                let text = "must be at most 16 characters that a symbol may have";
                return Err(FieldError::new(at("suffix"), &decl.suffix, text));
            }
            if decl.leverage_used() == 0 || decl.leverage_used() > LEVERAGE_MAX {
                let text = format!("must be 1 to {LEVERAGE_MAX}");
                return Err(FieldError::new(at("leverage"), decl.leverage_used(), text));
            }
            check_stop_out_percent(&at("stop_out_percent"), decl.stop_out_percent)?;
            let known = self.accounts.get(&decl.account);
            if known.is_some_and(|known| known.decl != *decl) {
                let text = "is already declared, and otherwise";
                return Err(FieldError::new(at("account"), decl.account, text));
            }
        }
        if self.accounts.len() + decls.len() > ACCOUNTS_MAX {
            let text = format!("the broker holds at most {ACCOUNTS_MAX} accounts");
            return Err(FieldError::new("accounts", decls.len(), text));
        }
        for decl in decls {
            if decl.stop_out_percent.is_some() {
                self.stop_outs.insert(decl.account);
            }
            self.accounts.entry(decl.account).or_insert_with(|| Account::new(decl));
        }
        Ok(())
    }

    /// Adds symbols; all of them or none.
    pub fn declare_symbols(&mut self, specs: Vec<SymbolSpec>) -> Result<(), FieldError> {
        for (index, spec) in specs.iter().enumerate() {
            let at = |name: &str| format!("symbols[{index}].{name}");
            if spec.symbol.as_str().len() > SYMBOL_CHARS_MAX {
                let text = "must be at most 48 characters, the rest is for suffixes";
                return Err(FieldError::new(at("symbol"), &spec.symbol, text));
            }
            if spec.digits > 10 {
                return Err(FieldError::new(at("digits"), spec.digits, "must be at most 10"));
            }
            if spec.lots_min > spec.lots_max {
                let text = format!("must be at least lots_min, {}", spec.lots_min);
                return Err(FieldError::new(at("lots_max"), spec.lots_max, text));
            }
            let known = self.symbols.get(&spec.symbol);
            if known.is_some_and(|known| known.spec != *spec) {
                let text = "is already declared, and otherwise";
                return Err(FieldError::new(at("symbol"), &spec.symbol, text));
            }
        }
        if self.symbols.len() + specs.len() > SYMBOLS_MAX {
            let text = format!("the broker holds at most {SYMBOLS_MAX} symbols");
            return Err(FieldError::new("symbols", specs.len(), text));
        }
        for spec in specs {
            let listed = || Listed { spec: spec.clone(), quote: None, watched: BTreeSet::new() };
            self.symbols.entry(spec.symbol.clone()).or_insert_with(listed);
        }
        Ok(())
    }

    /// A trader begins a session; remembers its token.
    pub fn login(
        &mut self,
        account: AccountId,
        token: Option<Token>,
        settings: Settings,
    ) -> Result<(), FieldError> {
        let account = self.account_mut(account)?;
        let token = token.unwrap_or(account.token_highest);
        if settings.check_tokens && token < account.token_highest {
            let text = format!("is older than {}, which was seen", account.token_highest);
            return Err(FieldError::new("token", token, text));
        }
        account.token_highest = account.token_highest.max(token);
        Ok(())
    }

    /// Takes prices, and does what they trigger; all of them or none.
    pub fn feed(
        &mut self,
        now: Now,
        quotes: &[FeedQuote],
        effects: &mut Effects,
    ) -> Result<(), FieldError> {
        for (index, quote) in quotes.iter().enumerate() {
            self.check_quote(index, quote)?;
        }
        for quote in quotes {
            self.take_quote(now, quote, effects);
        }
        Ok(())
    }

    fn check_quote(&self, index: usize, quote: &FeedQuote) -> Result<(), FieldError> {
        let at = |name: &str| format!("quotes[{index}].{name}");
        let Some(listed) = self.symbols.get(&quote.symbol) else {
            return Err(FieldError::new(at("symbol"), &quote.symbol, "is not declared"));
        };
        for (name, price) in [("bid", quote.bid), ("ask", quote.ask)] {
            if price.get().scale() > listed.spec.digits {
                let text = format!("must have at most {} digits", listed.spec.digits);
                return Err(FieldError::new(at(name), price, text));
            }
        }
        if quote.ask < quote.bid {
            let text = format!("must not be below the bid, {}", quote.bid);
            return Err(FieldError::new(at("ask"), quote.ask, text));
        }
        Ok(())
    }

    /// A trade is judged by the prices after the one that opened it.
    fn take_quote(&mut self, now: Now, feed: &FeedQuote, effects: &mut Effects) {
        let FeedQuote { symbol, bid, ask } = feed.clone();
        let quote = Quote { symbol, bid, ask, at: now.wall };
        let Some(listed) = self.symbols.get_mut(&feed.symbol) else { return };
        listed.quote = Some(quote.clone());
        effects.quotes.push(quote);
        for (account, ticket) in listed.watched.clone() {
            let cause = Cause::Trigger;
            if let Ok(mut desk) = self.desk(now, account, cause, effects) {
                desk.judge(ticket);
            }
        }
        for account in self.stop_outs.clone() {
            self.watch_margin(now, account, effects);
        }
    }

    fn watch_margin(&mut self, now: Now, account: AccountId, effects: &mut Effects) {
        if let Ok(mut desk) = self.desk(now, account, Cause::StopOut, effects) {
            desk.stop_out_if_due();
        }
    }

    /// Decides an order that no fault hits. `meta` is absent for a trade by hand.
    pub fn order(
        &mut self,
        now: Now,
        account: AccountId,
        meta: Option<&OrderMeta>,
        instruction: &Instruction,
        settings: Settings,
        effects: &mut Effects,
    ) -> Result<OrderReply, FieldError> {
        let terms = Terms { settings, ..Terms::default() };
        self.order_on(now, account, meta, instruction, &terms, effects)
    }

    /// Decides an order, and what faults make of it.
    pub fn order_on(
        &mut self,
        now: Now,
        account: AccountId,
        meta: Option<&OrderMeta>,
        instruction: &Instruction,
        terms: &Terms,
        effects: &mut Effects,
    ) -> Result<OrderReply, FieldError> {
        let settings = terms.settings;
        let cause = if meta.is_some() { Cause::Order } else { Cause::Manual };
        if let Some(meta) = meta {
            let account = self.account_mut(account)?;
            if settings.check_tokens && meta.token < account.token_highest {
                let text = format!("token {} below {}", meta.token, account.token_highest);
                let class = RejectClass::StaleToken;
                return Ok(OrderReply::Rejected(Rejection { class, text }));
            }
            account.token_highest = account.token_highest.max(meta.token);
        }
        let mut desk = self.desk(now, account, cause, effects)?;
        let percent = match &terms.verdict {
            Verdict::Refuse(rejection) => return Ok(OrderReply::Rejected(rejection.clone())),
            Verdict::FillPart(percent) => Some(*percent),
            Verdict::CarryOut => None,
        };
        (desk.fill_percent, desk.comment_fault) = (percent, terms.comment.clone());
        Ok(match desk.execute(instruction) {
            Ok(done) => OrderReply::Done(done),
            Err(rejection) => OrderReply::Rejected(rejection),
        })
    }

    /// An order of a token arrived: the account has seen it from now on.
    pub fn see_token(&mut self, account: AccountId, token: Token) -> Result<(), FieldError> {
        let account = self.account_mut(account)?;
        account.token_highest = account.token_highest.max(token);
        Ok(())
    }

    /// Sets the stop-out level of an account, or takes it away, and looks at once.
    pub fn set_stop_out(
        &mut self,
        now: Now,
        account: AccountId,
        percent: Option<u32>,
        effects: &mut Effects,
    ) -> Result<(), FieldError> {
        check_stop_out_percent("percent", percent)?;
        self.account_mut(account)?.stop_out_percent = percent;
        match percent {
            Some(_) => self.stop_outs.insert(account),
            None => self.stop_outs.remove(&account),
        };
        self.watch_margin(now, account, effects);
        Ok(())
    }

    /// Closes the trade with the largest loss, as a stop-out does, whatever the margin says.
    ///
    /// Errors: nothing is open, or nothing that is open has a price.
    pub fn stop_out(
        &mut self,
        now: Now,
        account: AccountId,
        effects: &mut Effects,
    ) -> Result<FollowerTicket, FieldError> {
        let mut desk = self.desk(now, account, Cause::StopOut, effects)?;
        let nothing = || FieldError::new("account", account, "has no trade that can be closed");
        desk.close_largest_loss().ok_or_else(nothing)
    }

    /// Money in, or out if negative.
    pub fn deposit(
        &mut self,
        now: Now,
        account: AccountId,
        amount: Money,
        effects: &mut Effects,
    ) -> Result<(), FieldError> {
        let mut desk = self.desk(now, account, Cause::Manual, effects)?;
        desk.account.balance = add_money(desk.account.balance, amount.get());
        desk.tell(AccountChange::FundsChanged {});
        self.watch_margin(now, account, effects);
        Ok(())
    }

    fn desk<'a>(
        &'a mut self,
        now: Now,
        account: AccountId,
        cause: Cause,
        effects: &'a mut Effects,
    ) -> Result<Desk<'a>, FieldError> {
        let Self { accounts, symbols, last_ticket, .. } = self;
        let account = accounts.get_mut(&account).ok_or_else(|| unknown_account(account))?;
        let (fill_percent, comment_fault) = (None, None);
        Ok(Desk { account, symbols, last_ticket, now, cause, effects, fill_percent, comment_fault })
    }

    fn account_mut(&mut self, account: AccountId) -> Result<&mut Account, FieldError> {
        self.accounts.get_mut(&account).ok_or_else(|| unknown_account(account))
    }

    fn account(&self, account: AccountId) -> Result<&Account, FieldError> {
        self.accounts.get(&account).ok_or_else(|| unknown_account(account))
    }

    /// Everything an account holds.
    pub fn book(&self, now: Now, account: AccountId) -> Result<AccountBook, FieldError> {
        Ok(self.account(account)?.book(&self.symbols, now))
    }

    /// Refuses who does not know the account's password, if it has one. The value is not repeated.
    pub fn check_password(
        &self,
        account: AccountId,
        given: Option<&Password>,
    ) -> Result<(), FieldError> {
        match &self.account(account)?.decl.password {
            Some(password) if given != Some(password) => {
                Err(FieldError::new("password", "***", "is missing or wrong"))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// How an account treats partial closes, and whether it nets.
    pub fn style(&self, account: AccountId) -> Result<Style, FieldError> {
        Ok(self.account(account)?.decl.style)
    }

    /// What an account's group appends to symbols.
    pub fn suffix(&self, account: AccountId) -> Result<&str, FieldError> {
        Ok(&self.account(account)?.decl.suffix)
    }

    /// A page of closed trades, from entry `after` of the account's history.
    pub fn history(
        &self,
        account: AccountId,
        since: Micros,
        after: u64,
    ) -> Result<HistoryPage, FieldError> {
        let history = &self.account(account)?.history;
        let start = usize::try_from(after).unwrap_or(usize::MAX).min(history.len());
        let mut trades = Vec::new();
        for (index, trade) in history.iter().enumerate().skip(start) {
            if trades.len() == PAGE_ROWS_MAX {
                return Ok(HistoryPage { trades, next: Some(index as u64) });
            }
            if trade.closed_at >= since {
                trades.push(trade.clone());
            }
        }
        Ok(HistoryPage { trades, next: None })
    }

    /// The symbols as an account sees them.
    pub fn symbols(&self, account: AccountId) -> Result<Vec<SymbolSpec>, FieldError> {
        let account = self.account(account)?;
        let shown = |listed: &Listed| SymbolSpec {
            symbol: account.shown(&listed.spec.symbol),
            ..listed.spec.clone()
        };
        Ok(self.symbols.values().map(shown).collect())
    }

    /// The last prices as an account sees them.
    pub fn quotes(&self, account: AccountId) -> Result<Vec<Quote>, FieldError> {
        let account = self.account(account)?;
        let quotes = self.symbols.values().filter_map(|listed| listed.quote.as_ref());
        Ok(quotes.map(|q| Quote { symbol: account.shown(&q.symbol), ..q.clone() }).collect())
    }

    /// A page of accounts, without their passwords.
    pub fn accounts(&self, after: Option<AccountId>) -> AccountsPage {
        let told = |a: &Account| AccountDecl { password: None, ..a.decl.clone() };
        let mut accounts: Vec<_> = self.accounts_after(after).map(told).collect();
        let has_more = accounts.len() > PAGE_ACCOUNTS_MAX;
        accounts.truncate(PAGE_ACCOUNTS_MAX);
        let next = accounts.last().filter(|_| has_more).map(|decl| decl.account);
        AccountsPage { accounts, next }
    }

    /// A page of accounts with what they hold.
    pub fn books(&self, now: Now, after: Option<AccountId>) -> BooksPage {
        let (mut books, mut held): (Vec<AccountBook>, usize) = (Vec::new(), 0);
        for account in self.accounts_after(after) {
            if books.len() == PAGE_ACCOUNTS_MAX || held >= PAGE_HELD_MAX {
                let next = books.last().map(|book| book.account);
                return BooksPage { books, next };
            }
            held += account.trades.len() + account.waiting.len();
            books.push(account.book(&self.symbols, now));
        }
        BooksPage { books, next: None }
    }

    fn accounts_after(&self, after: Option<AccountId>) -> impl Iterator<Item = &Account> {
        use std::ops::Bound;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.accounts.range((from, Bound::Unbounded)).map(|(_, a)| a).take(PAGE_ACCOUNTS_MAX + 1)
    }
}

fn unknown_account(account: AccountId) -> FieldError {
    FieldError::new("account", account, "is not declared")
}
