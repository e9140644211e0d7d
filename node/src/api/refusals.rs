//! The refusals of each kind of request, for the description of the API.
//!
//! Invariant: what a handler may answer is here, and what every request may meet on its way to a handler is
//! in the macro. Tests hold the answers of nodes that run to it.

use super::problem::Problem;
use utoipa::IntoResponses;

// Every request may be one without a good token, or come at a bad time.
macro_rules! refusals {
    (
        $(#[$doc:meta])*
        $name:ident, not now: $unavailable:literal
        $(, $variant:ident = $status:literal $means:literal)* $(,)?
    ) => {
        $(#[$doc])*
        #[derive(IntoResponses)]
        #[allow(dead_code, reason = "described, never made")]
        pub(super) enum $name {
            #[response(
                status = 401,
                description = "No token, or one that is not known, revoked or expired",
                content_type = "application/problem+json"
            )]
            Unauthorized(Problem),
            #[response(
                status = 403,
                description = "The token does not allow it",
                content_type = "application/problem+json"
            )]
            Forbidden(Problem),
            $(
                #[response(status = $status, description = $means, content_type = "application/problem+json")]
                $variant(Problem),
            )*
            #[response(
                status = 500,
                description = "A row holds a value that cannot be; the log of the node names it",
                content_type = "application/problem+json"
            )]
            Fault(Problem),
            #[response(
                status = 503,
                description = concat!(
                    "Not now, and Retry-After says when to ask again; `reason` says why: ",
                    $unavailable,
                    "`database` (it does not answer), `database_slow` (it takes too long), `database_rights` (the node's role in the database lacks a right: it has to be a member of lockstep_api as well as of lockstep_node), `busy` (too much is under way), `slow` (not done in time)",
                ),
                content_type = "application/problem+json",
                headers(("Retry-After" = u32, description = "Seconds until it is worth another try"))
            )]
            Unavailable(Problem),
        }
    };
}

refusals! {
    /// Of a list.
    ListRefusals, not now: "",
    Invalid = 422 "A value of the query is wrong, or nobody knows the field",
}

refusals! {
    /// Of one thing.
    OneRefusals, not now: "",
    NotFound = 404 "There is no such thing",
    Invalid = 422 "A value of the query is wrong, or nobody knows the field",
}

refusals! {
    /// Of what masters are asked for.
    PositionRefusals, not now: "`bus` (this node is cut from the bus, so that no master can be asked; one that does not answer is `unknown` in an answer), ",
    NotFound = 404 "There is no such account",
    Invalid = 422 "A value of the query is wrong, or nobody knows the field",
}

refusals! {
    /// Of a change.
    ChangeRefusals, not now: "",
    Malformed = 400 "The body is no JSON",
    NotFound = 404 "There is no such thing",
    TooLarge = 413 "The body is too large",
    MediaType = 415 "The body is not application/json",
    Invalid = 422 "A value of the body is wrong, or nobody knows the field",
}

refusals! {
    /// Of the wish to close a copy.
    CloseRefusals, not now: "`lease_not_confirmed` (no order may leave), `no_session` (none is open at the broker), `no_owner` (nobody has the account), `no_thread` (none was free for the order), `draining` (the account is on its way to another node), `opening` (the open is not answered yet), ",
    NotFound = 404 "Nothing was ever copied under this ticket of this link",
    Conflict = 409 "A request with this Idempotency-Key is under way, or it was used for another one; or the follower is switched off, so that nobody closes its copies",
    Misdirected = 421 "Another node has the account; the answer names it",
    Invalid = 422 "A value is wrong, or nobody knows the field",
}

refusals! {
    /// Of the wish to have an account handed over.
    ReleaseRefusals, not now: "`no_owner` (nobody has the account), `no_answer` (its owner did not answer, and may still do it), `bus` (this node is cut from the bus), ",
    NotFound = 404 "There is no such account",
    Conflict = 409 "Its owner keeps it: no other node has room for it; or it is switched off, so that no node has it",
    Invalid = 422 "A value of the query is wrong, or nobody knows the field",
}

refusals! {
    /// Of the wish to take a token back.
    RevokeRefusals, not now: "",
    NotFound = 404 "There is no such token",
    Conflict = 409 "It is the token that asks: another one has to take it back, or the command line",
    Invalid = 422 "A value of the query is wrong, or nobody knows the field",
}

/// Of the question whether the node can do its work.
#[derive(IntoResponses)]
#[allow(dead_code, reason = "described, never made")]
pub(super) enum ProbeRefusals {
    #[response(
        status = 503,
        description = "It cannot, and the detail names what is not there; `reason` is `not_ready`",
        content_type = "application/problem+json",
        headers(("Retry-After" = u32, description = "Seconds until it is worth another try"))
    )]
    Unavailable(Problem),
}
