//! Subject names of the bus: built and parsed here only.
//!
//! Invariant: every token that comes from data is a number, so that nothing a
//! broker or a person typed can widen a subject.

use crate::ids::AccountId;

/// What every subject starts with: product and version of the contract.
pub const PREFIX: &str = "lockstep.v1";

/// Where a master's events go.
pub fn event(master: AccountId) -> String {
    format!("{PREFIX}.master.{master}.event")
}

/// Where a master's beacons go.
pub fn beacon(master: AccountId) -> String {
    format!("{PREFIX}.master.{master}.beacon")
}

/// Events and beacons of one master: one subscription keeps them in order.
pub fn master_all(master: AccountId) -> String {
    format!("{PREFIX}.master.{master}.*")
}

/// Where a master's snapshot is asked for.
pub fn snapshot(master: AccountId) -> String {
    format!("{PREFIX}.snapshot.{master}")
}

/// What the subjects of answers start with: not below [`PREFIX`], so that who may listen there does not
/// hear them.
pub const REPLY_PREFIX: &str = "lockstep-reply.v1";

/// Where the snapshot of a master is sent to one who asked for it: the master's number is in it, so
/// that a server can see to it that nobody answers for another one.
pub fn reply(master: AccountId, unique: &str) -> String {
    format!("{REPLY_PREFIX}.{master}.{unique}")
}

/// Every answer about these masters.
pub fn replies(master: AccountId) -> String {
    format!("{REPLY_PREFIX}.{master}.>")
}

/// Where nodes tell each other the timeline of the database with this system identifier.
pub fn timeline(database: u64) -> String {
    format!("{PREFIX}.control.timeline.{database}")
}

/// Where the owner of an account is asked for something.
pub fn control_account(account: AccountId) -> String {
    format!("{PREFIX}.control.account.{account}")
}

/// Every request to the owners of accounts.
pub fn control_accounts() -> String {
    format!("{PREFIX}.control.account.*")
}

/// The account whose owner a request is for; nothing if the subject is none of a request.
pub fn controlled(subject: &str) -> Option<AccountId> {
    let token = subject.strip_prefix(PREFIX)?.strip_prefix(".control.account.")?;
    canonical_account(token)
}

/// What the subjects of owners' answers start with; no account has such a number.
const CONTROL_REPLY_PREFIX: &str = "lockstep-reply.v1.control";

/// Where one who asks an owner wants the answer. `unique` is one or more tokens; the first is the
/// name of the user of the bus, where there are users.
pub fn control_reply(unique: &str) -> String {
    format!("{CONTROL_REPLY_PREFIX}.{unique}")
}

/// Every answer of an owner to this user.
pub fn control_replies(user: &str) -> String {
    format!("{CONTROL_REPLY_PREFIX}.{user}.>")
}

/// Whether an owner may send an answer there: anywhere else it would be a message of its own.
pub fn is_control_reply(subject: &str) -> bool {
    subject.strip_prefix(CONTROL_REPLY_PREFIX).is_some_and(|rest| rest.starts_with('.'))
}

/// What a subject of the bus is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A trade event of this master.
    Event(AccountId),
    /// A beacon of this master.
    Beacon(AccountId),
    /// A request for the snapshot of this master.
    Snapshot(AccountId),
}

/// Reads a subject; nothing if it is not one of ours.
pub fn parse(subject: &str) -> Option<Subject> {
    let rest = subject.strip_prefix(PREFIX)?.strip_prefix('.')?;
    let mut tokens = rest.split('.');
    let family = tokens.next()?;
    let account = canonical_account(tokens.next()?)?;
    let parsed = match (family, tokens.next()) {
        ("master", Some("event")) => Subject::Event(account),
        ("master", Some("beacon")) => Subject::Beacon(account),
        ("snapshot", None) => Subject::Snapshot(account),
        _ => return None,
    };
    tokens.next().is_none().then_some(parsed)
}

/// One account has one token: `007` and `+7` are not account 7.
fn canonical_account(token: &str) -> Option<AccountId> {
    let account: AccountId = token.parse().ok()?;
    (account.to_string() == token).then_some(account)
}
