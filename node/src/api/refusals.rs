//! The refusals of each kind of request, for the description of the API.

use super::problem::Problem;
use utoipa::IntoResponses;

// Every request may be one without a good token.
macro_rules! refusals {
    ($(#[$doc:meta])* $name:ident: $($variant:ident = $status:literal $means:literal),+ $(,)?) => {
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
            )+
        }
    };
}

refusals! {
    /// Of a list.
    ListRefusals:
    Invalid = 422 "A value of the query is wrong, or nobody knows the field",
    Unavailable = 503 "The database does not answer, or too many requests are under way; Retry-After says when to ask again",
}

refusals! {
    /// Of one thing.
    OneRefusals:
    NotFound = 404 "There is no such thing",
    Invalid = 422 "A value of the query is wrong, or nobody knows the field",
    Unavailable = 503 "The database does not answer, or too many requests are under way; Retry-After says when to ask again",
}

refusals! {
    /// Of a change.
    ChangeRefusals:
    Malformed = 400 "The body is no JSON",
    NotFound = 404 "There is no such thing",
    TooLarge = 413 "The body is too large",
    MediaType = 415 "The body is not application/json",
    Invalid = 422 "A value of the body is wrong, or nobody knows the field",
    Unavailable = 503 "The database does not answer, or too many requests are under way; Retry-After says when to ask again",
}

refusals! {
    /// Of the wish to close a copy.
    CloseRefusals:
    NotFound = 404 "Nothing was ever copied under this ticket of this link",
    Conflict = 409 "A request with this Idempotency-Key is under way, or it was used for another one",
    Misdirected = 421 "Another node has the account; the answer names it",
    Invalid = 422 "A value is wrong, or nobody knows the field",
    Unavailable = 503 "No order can leave now, and none will: the lease is not confirmed, there is no session at the broker, nobody has the account. `reason` says which; Retry-After says when to ask again",
}
