//! Texts that nobody may see, and addresses of which a part may be seen.
//!
//! Invariants:
//! 1. A secret cannot be printed, logged or serialised: `Debug` shows stars, and there is no `Display`.
//!    An address shows scheme, user and place.
//! 2. Its memory is overwritten when it is dropped.
//!
//! Not covered: what [`Secret::expose`] hands out, and copies that a library makes of it.

use std::fmt;
use zeroize::Zeroizing;

/// A password or the like.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// Keeps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// The text, for whoever has to say it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// An address that may hold a password: `Debug` and `Display` hide it.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretUrl(Secret);

impl SecretUrl {
    /// Keeps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(Secret::new(text))
    }

    /// The whole text, for whoever connects.
    pub fn expose(&self) -> &str {
        self.0.expose()
    }
}

impl fmt::Display for SecretUrl {
    /// Scheme, user and place. Everything from a `?` on is left out: parameters may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((scheme, rest)) = self.expose().split_once("://") else {
            return f.write_str("***");
        };
        let without_parameters =
            |place: &str| place.split(['?', '#']).next().unwrap_or_default().to_owned();
        match rest.rsplit_once('@') {
            None => write!(f, "{scheme}://{}", without_parameters(rest)),
            Some((user, place)) => {
                let place = without_parameters(place);
                let odd = user.contains(['/', '?', '#', '@']);
                match user.split_once(':') {
                    Some((user, _password)) if !odd => write!(f, "{scheme}://{user}:***@{place}"),
                    // A single word before the @ is a token where NATS reads it.
                    None if !odd && scheme.starts_with("postgres") => {
                        write!(f, "{scheme}://{user}@{place}")
                    }
                    Some(_) | None => write!(f, "{scheme}://***@{place}"),
                }
            }
        }
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
