//! Who may use the API: bearer tokens, as the database knows them.
//!
//! Decides: whether a token is good now, and for what.
//! In: the text of a token, rows of `api_tokens`. Out: [`Caller`], or [`Refused`].
//!
//! A token is `lst_NUMBER_SECRET`, the secret 256 random bits in hex. Only its SHA-256 is stored. A
//! slow hash is for secrets that people choose: of 2^256 nobody tries enough, and a slow one would
//! let every stranger keep this node busy.
//!
//! Invariants:
//! 1. The secret is shown once, when it is made; it is in no row, log line or error.
//! 2. Hashes are compared in constant time. The row is found by its number, so that no index tells
//!    how much of a hash was right.
//! 3. One that is revoked or has expired is refused from that moment on, by the database's clock.
//!
//! Not covered: which links a token may see. All accounts of a fleet are one operator's.

use crate::secret::Secret;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sqlx::{PgConnection, Row};
use subtle::ConstantTimeEq;
use time::OffsetDateTime;

/// What every token begins with, so that one that was lost can be found by a search.
const PREFIX: &str = "lst_";
/// Bytes of a secret.
const SECRET_BYTES: usize = 32;

/// What a token allows; each allows what the ones before it do.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    clap::ValueEnum,
    utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// See everything.
    Read,
    /// Set modes and close copies.
    Operate,
    /// See and take back tokens, and have accounts handed over.
    Admin,
}

impl Scope {
    /// The word in rows.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Operate => "operate",
            Scope::Admin => "admin",
        }
    }

    fn from_word(word: &str) -> Option<Scope> {
        [Scope::Read, Scope::Operate, Scope::Admin].into_iter().find(|s| s.as_str() == word)
    }
}

/// A token in a list.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
pub struct TokenRow {
    /// Its number.
    pub id: i64,
    /// What it is called.
    pub name: String,
    /// What it allows.
    pub scope: Scope,
    /// When it was made.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// From when on it is refused.
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// Since when it is revoked.
    pub revoked_at: Option<String>,
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Number of the token.
    pub token: i64,
    /// Its name.
    pub name: String,
    /// What it allows.
    pub scope: Scope,
}

/// Why a token is not good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Nobody made it, or its text is damaged.
    #[error("the token is not known")]
    Unknown,
    /// It was taken back.
    #[error("the token is revoked")]
    Revoked,
    /// Its time is over.
    #[error("the token has expired")]
    Expired,
}

/// Why a token could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The database did not answer or refused.
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    /// The system gave no random bytes.
    #[error("no random bytes: {0}")]
    Random(getrandom::Error),
    /// There is one of this name.
    #[error("name {0:?}: there is a token of this name already")]
    NameTaken(String),
    /// The name is none.
    #[error("name {0:?}: must be 1 to 64 letters, digits, '.', '_' and '-'")]
    BadName(String),
    /// A row holds a word that cannot be.
    #[error("api_tokens {id}: column scope holds {word:?}")]
    Scope {
        /// The row.
        id: i64,
        /// The word.
        word: String,
    },
}

/// Makes a token that is good for so many days.
pub async fn add(
    db: &mut PgConnection,
    name: &str,
    scope: Scope,
    days: u16,
) -> Result<(TokenRow, Secret), TokenError> {
    let mut bytes = [0_u8; SECRET_BYTES];
    getrandom::fill(&mut bytes).map_err(TokenError::Random)?;
    let secret: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let row = sqlx::query(
        "insert into api_tokens (name, scope, sha256, expires_at) \
         values ($1, $2, $3, clock_timestamp() + $4 * interval '1 day') \
         returning id, name, scope, created_at, expires_at, revoked_at",
    )
    .bind(name)
    .bind(scope.as_str())
    .bind(hash(&secret).as_slice())
    .bind(f64::from(days))
    .fetch_one(db)
    .await
    .map_err(|error| refusal(error, name))?;
    let row = token_row(&row)?;
    let text = Secret::new(format!("{PREFIX}{}_{secret}", row.id));
    Ok((row, text))
}

fn refusal(error: sqlx::Error, name: &str) -> TokenError {
    match error.as_database_error().and_then(|refusal| refusal.constraint()) {
        Some("api_tokens_one_good_per_name") => TokenError::NameTaken(name.to_owned()),
        Some("api_tokens_name_word") => TokenError::BadName(name.to_owned()),
        _ => TokenError::Database(error),
    }
}

/// Tokens after this number, by number; at most so many.
pub async fn list(
    db: &mut PgConnection,
    after: i64,
    rows_max: i64,
) -> Result<Vec<TokenRow>, TokenError> {
    let rows = sqlx::query(
        "select id, name, scope, created_at, expires_at, revoked_at from api_tokens \
         where id > $1 order by id limit $2",
    );
    rows.bind(after).bind(rows_max).fetch_all(db).await?.iter().map(token_row).collect()
}

fn token_row(row: &sqlx::postgres::PgRow) -> Result<TokenRow, TokenError> {
    let at = |column| crate::directory::rfc3339(row.get::<OffsetDateTime, _>(column));
    Ok(TokenRow {
        id: row.get("id"),
        name: row.get("name"),
        scope: scope_of(row)?,
        created_at: at("created_at"),
        expires_at: at("expires_at"),
        revoked_at: row.get::<Option<_>, _>("revoked_at").map(crate::directory::rfc3339),
    })
}

fn scope_of(row: &sqlx::postgres::PgRow) -> Result<Scope, TokenError> {
    let word: &str = row.get("scope");
    Scope::from_word(word)
        .ok_or_else(|| TokenError::Scope { id: row.get("id"), word: word.to_owned() })
}

/// Takes back the good token of this name; says whether there was one.
pub async fn revoke(db: &mut PgConnection, name: &str) -> Result<bool, TokenError> {
    let done = sqlx::query(
        "update api_tokens set revoked_at = clock_timestamp() where name = $1 and revoked_at is null",
    );
    Ok(done.bind(name).execute(db).await?.rows_affected() > 0)
}

/// Takes back the token of this number: its name, and whether it was not taken back before. Nothing where
/// there is no such token.
pub async fn revoke_number(
    db: &mut PgConnection,
    id: i64,
) -> Result<Option<(String, bool)>, TokenError> {
    // The row as it was before is seen beside the one that is written.
    let row = sqlx::query(
        "with revoked as (update api_tokens set revoked_at = clock_timestamp() \
           where id = $1 and revoked_at is null returning id) \
         select name, exists (select from revoked) as changed from api_tokens where id = $1",
    );
    let row = row.bind(id).fetch_optional(db).await?;
    Ok(row.map(|row| (row.get("name"), row.get("changed"))))
}

/// Who has this token, if it is good now.
pub async fn check(
    db: &mut PgConnection,
    presented: &Presented,
) -> Result<Result<Caller, Refused>, TokenError> {
    let row = sqlx::query(
        "select id, name, scope, sha256, revoked_at is not null as is_revoked, \
         expires_at <= clock_timestamp() as is_over from api_tokens where id = $1",
    );
    let Some(row) = row.bind(presented.id).fetch_optional(db).await? else {
        return Ok(Err(Refused::Unknown));
    };
    let stored: &[u8] = row.get("sha256");
    if !bool::from(stored.ct_eq(&presented.sha256)) {
        return Ok(Err(Refused::Unknown));
    }
    if row.get("is_revoked") {
        return Ok(Err(Refused::Revoked));
    }
    if row.get("is_over") {
        return Ok(Err(Refused::Expired));
    }
    Ok(Ok(Caller { token: presented.id, name: row.get("name"), scope: scope_of(&row)? }))
}

/// A token as somebody showed it: its number, and the hash of its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presented {
    id: i64,
    sha256: [u8; 32],
}

impl Presented {
    /// Reads the text of a token; nothing if it cannot be one, without asking anybody.
    pub fn from_text(text: &str) -> Option<Presented> {
        let (id, secret) = text.strip_prefix(PREFIX)?.split_once('_')?;
        let is_hex = secret.len() == 2 * SECRET_BYTES
            && secret.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let id: i64 = id.parse().ok().filter(|id| *id > 0 && is_hex)?;
        Some(Presented { id, sha256: hash(secret) })
    }
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn database() -> PgConnection {
        let server = devstack::shared_postgres().await.unwrap();
        let url = server.create_database("tokens").await.unwrap();
        crate::database::connect_migrated(&url, "test").await.unwrap()
    }

    async fn asked(db: &mut PgConnection, text: &str) -> Result<Caller, Refused> {
        match Presented::from_text(text) {
            Some(presented) => check(db, &presented).await.unwrap(),
            None => Err(Refused::Unknown),
        }
    }

    #[tokio::test]
    async fn a_token_is_good_until_it_is_revoked_or_its_time_is_over() {
        let mut db = database().await;
        let (row, secret) = add(&mut db, "grafana", Scope::Operate, 30).await.unwrap();
        let text = secret.expose().to_owned();
        assert_eq!(format!("{secret:?}"), "***");
        let caller = asked(&mut db, &text).await.unwrap();
        assert_eq!((caller.token, caller.scope), (row.id, Scope::Operate));
        sqlx::query("update api_tokens set expires_at = clock_timestamp()")
            .execute(&mut db)
            .await
            .unwrap();
        assert_eq!(asked(&mut db, &text).await, Err(Refused::Expired));
        assert!(revoke(&mut db, "grafana").await.unwrap());
        assert!(!revoke(&mut db, "grafana").await.unwrap(), "it is already");
        assert_eq!(asked(&mut db, &text).await, Err(Refused::Revoked));
    }

    #[tokio::test]
    async fn a_text_that_differs_in_one_place_is_not_known() {
        let mut db = database().await;
        let (_, secret) = add(&mut db, "a", Scope::Read, 1).await.unwrap();
        let text = secret.expose();
        let last = if text.ends_with('0') { '1' } else { '0' };
        let mut other = text[..text.len() - 1].to_owned();
        other.push(last);
        let next_row = text.replacen("lst_1_", "lst_2_", 1);
        for wrong in [other.as_str(), &next_row, &text[1..], &text.to_uppercase(), "", "lst_1_"] {
            assert_eq!(asked(&mut db, wrong).await, Err(Refused::Unknown), "{wrong}");
        }
    }

    #[test]
    fn what_cannot_be_a_token_is_known_without_asking_anybody() {
        let secret = "0a".repeat(SECRET_BYTES);
        assert!(Presented::from_text(&format!("lst_1_{secret}")).is_some());
        for odd in [
            format!("lst_0_{secret}"),
            format!("lst_-1_{secret}"),
            format!("lst_1_{secret}0"),
            format!("lst_1_{}", &secret[1..]),
            format!("lst_1_{}", secret.to_uppercase()),
            format!("lst_1_{}", secret.replace('a', "g")),
            format!("LST_1_{secret}"),
            "lst_1_".to_owned(),
        ] {
            assert_eq!(Presented::from_text(&odd), None, "{odd}");
        }
    }

    #[tokio::test]
    async fn a_name_is_free_again_when_its_token_is_revoked() {
        let mut db = database().await;
        add(&mut db, "a", Scope::Read, 1).await.unwrap();
        let again = add(&mut db, "a", Scope::Read, 1).await.unwrap_err();
        assert!(matches!(again, TokenError::NameTaken(_)), "{again}");
        revoke(&mut db, "a").await.unwrap();
        add(&mut db, "a", Scope::Admin, 1).await.unwrap();
        let odd = add(&mut db, "a b", Scope::Read, 1).await.unwrap_err();
        assert!(matches!(odd, TokenError::BadName(_)), "{odd}");
        let listed = list(&mut db, 0, 10).await.unwrap();
        assert_eq!(listed.len(), 2);
        assert!(listed[0].revoked_at.is_some() && listed[1].revoked_at.is_none());
        assert_eq!(list(&mut db, listed[0].id, 10).await.unwrap().len(), 1);
        assert_eq!(list(&mut db, 0, 1).await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn a_token_is_taken_back_by_its_number_and_only_once() {
        let mut db = database().await;
        let (row, secret) = add(&mut db, "a", Scope::Admin, 1).await.unwrap();
        let (other, _) = add(&mut db, "b", Scope::Read, 1).await.unwrap();
        let taken_back = |changed| Some(("a".to_owned(), changed));
        assert_eq!(revoke_number(&mut db, row.id).await.unwrap(), taken_back(true));
        assert_eq!(revoke_number(&mut db, row.id).await.unwrap(), taken_back(false));
        assert_eq!(asked(&mut db, secret.expose()).await, Err(Refused::Revoked));
        assert_eq!(revoke_number(&mut db, other.id + 1).await.unwrap(), None);
        let listed = list(&mut db, 0, 10).await.unwrap();
        assert!(listed[1].revoked_at.is_none(), "the other one is good");
    }

    // The rows hold nothing that a token could be made from.
    #[tokio::test]
    async fn no_row_holds_the_secret() {
        let mut db = database().await;
        let (_, secret) = add(&mut db, "a", Scope::Read, 1).await.unwrap();
        let (_, secret) = secret.expose().rsplit_once('_').unwrap();
        let rows: Vec<String> = sqlx::query_scalar("select t::text from api_tokens t")
            .fetch_all(&mut db)
            .await
            .unwrap();
        assert!(rows.iter().all(|row| !row.contains(secret)), "{rows:?}");
    }
}
