//! Passwords at rest: sealed under a key of their own, which a master key wraps.
//!
//! Decides: whether a sealed password may be opened here, for this account.
//! In: master keys, the account, and a row of `account_credentials` or a password. Out: the other one
//! of the two, or why not ([`CredentialError`]).
//!
//! Both layers are AES-256-GCM. Platform, account number and layer are bound to the ciphertext as
//! associated data, so that a row that is copied to another account, or a wrapped key taken for a
//! password, does not open.
//!
//! Invariants:
//! 1. A master key seals nothing but row keys, a row key nothing but one password: each seal has a
//!    nonce of 96 random bits and each password a key of its own, so that no nonce meets a key twice.
//! 2. Changing the master key touches no password: [`rewrap`] leaves `sealed` as it is.
//! 3. No key, password or part of one is in any error, or in any `Debug`.
//!
//! Not covered: somebody who can read the node's memory or its master key.

use crate::secret::Secret;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use schemas::AccountId;
use std::fmt;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Bytes of every key.
pub const KEY_BYTES: usize = 32;
/// Longest password; chosen, and the same in the table's constraint.
pub const PASSWORD_BYTES_MAX: usize = 1_024;
/// Keys that one node accepts: the present one and those that rows may still be wrapped with.
pub const KEYS_MAX: usize = 16;

/// Why a password cannot be sealed or opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CredentialError {
    /// The account has a password, and this process no key: give it one.
    #[error("there is no master key here, see LOCKSTEP_MASTER_KEY_FILE")]
    NoKey,
    /// The key that it is wrapped with is none of those here: give that one as well.
    #[error(
        "the master key {key_id} that the password is wrapped with is not here, see LOCKSTEP_MASTER_KEY_FILE"
    )]
    OtherKey {
        /// Which one.
        key_id: String,
    },
    /// The row was made for another account, or changed: store the password anew.
    #[error("the sealed password does not belong to this account, or was changed; store it anew")]
    NotOurs,
    /// The password is empty or too long.
    #[error("a password has 1 to {PASSWORD_BYTES_MAX} bytes, got {bytes}")]
    Length {
        /// How many there are.
        bytes: usize,
    },
    /// The operating system gave no random bytes.
    #[error("there are no random bytes")]
    NoRandom,
}

/// Why a text holds no master keys. The text is never repeated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A line is no key.
    #[error("line {line} must be {} hexadecimal digits, a comment that begins with #, or empty", KEY_BYTES * 2)]
    Line {
        /// Which one, from 1.
        line: usize,
    },
    /// There is no key, or far too many.
    #[error("must hold 1 to {KEYS_MAX} keys, got {keys}")]
    Count {
        /// How many there are.
        keys: usize,
    },
}

/// One master key.
#[derive(Clone)]
pub struct MasterKey {
    id: String,
    bytes: Zeroizing<[u8; KEY_BYTES]>,
}

impl MasterKey {
    /// A new one.
    pub fn random() -> Result<Self, CredentialError> {
        Ok(Self::of(random_key()?))
    }

    fn of(bytes: Zeroizing<[u8; KEY_BYTES]>) -> Self {
        let hash = digest(&SHA256, bytes.as_slice());
        // Eight bytes of the hash of a random key say nothing about the key.
        Self { id: hex::encode(&hash.as_ref()[..8]), bytes }
    }

    /// What names it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The line that [`MasterKeys::parse`] reads.
    pub fn to_line(&self) -> Zeroizing<String> {
        Zeroizing::new(hex::encode(self.bytes.as_slice()))
    }
}

/// The master keys of a process; the first one seals, all of them open.
#[derive(Clone)]
pub struct MasterKeys(Arc<[MasterKey]>);

impl MasterKeys {
    /// Reads keys, one a line, the present one first.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let mut keys = Vec::new();
        for (index, line) in text.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut bytes = Zeroizing::new([0; KEY_BYTES]);
            hex::decode_to_slice(line, bytes.as_mut_slice())
                .map_err(|_| KeyError::Line { line: index + 1 })?;
            keys.push(MasterKey::of(bytes));
        }
        if keys.is_empty() || keys.len() > KEYS_MAX {
            return Err(KeyError::Count { keys: keys.len() });
        }
        Ok(Self(keys.into()))
    }

    /// The one that seals.
    pub fn present(&self) -> &MasterKey {
        &self.0[0]
    }

    /// What names each of them, the present one first.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(MasterKey::id)
    }

    fn named(&self, id: &str) -> Option<&MasterKey> {
        self.0.iter().find(|key| key.id == id)
    }
}

/// Stored passwords that none of the master keys here opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unopened {
    /// There is no key.
    #[error("none, and passwords are stored for {stored} accounts: they cannot log in here")]
    NoKey {
        /// Passwords that are stored.
        stored: i64,
    },
    /// The keys are others.
    #[error(
        "none of the keys here opens {unopened} of {stored} stored passwords: their accounts cannot log \
         in here"
    )]
    OtherKeys {
        /// Passwords under other keys.
        unopened: i64,
        /// All of them.
        stored: i64,
    },
}

impl Unopened {
    /// What these keys do not open of the passwords that each key, by its name, has wrapped.
    pub fn among(wrapped: &[(String, i64)], keys: Option<&MasterKeys>) -> Option<Self> {
        let stored = wrapped.iter().map(|(_, count)| count).sum();
        let Some(keys) = keys else {
            return (stored > 0).then_some(Unopened::NoKey { stored });
        };
        let others = wrapped.iter().filter(|(key, _)| keys.named(key).is_none());
        let unopened = others.map(|(_, count)| count).sum();
        (unopened > 0).then_some(Unopened::OtherKeys { unopened, stored })
    }

    /// A key was given, and opens no password at all.
    pub fn is_wrong_key(self) -> bool {
        matches!(self, Unopened::OtherKeys { unopened, stored } if unopened == stored)
    }
}

impl PartialEq for MasterKeys {
    fn eq(&self, other: &Self) -> bool {
        self.ids().eq(other.ids())
    }
}

impl Eq for MasterKeys {}

impl fmt::Debug for MasterKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ids()).finish()
    }
}

/// Whose password it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder<'a> {
    /// The account.
    pub account: AccountId,
    /// Its platform.
    pub platform: &'a str,
}

impl Holder<'_> {
    /// What is bound to a ciphertext of this layer.
    fn binding(self, layer: &str) -> Vec<u8> {
        // A platform is a word without blanks, so that no two holders are written alike.
        format!("lockstep credential 1 {layer} {} {}", self.platform, self.account).into_bytes()
    }
}

/// A password as the database holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// Which master key wraps the row's own.
    pub key_id: String,
    /// Nonce, the row's key under the master key, and what proves it.
    pub wrapped_key: Vec<u8>,
    /// Nonce, the password under the row's key, and what proves it.
    pub sealed: Vec<u8>,
}

/// Seals a password with the present master key.
pub fn seal(
    keys: Option<&MasterKeys>,
    holder: Holder<'_>,
    password: &Secret,
) -> Result<Sealed, CredentialError> {
    let bytes = password.expose().len();
    if bytes == 0 || bytes > PASSWORD_BYTES_MAX {
        return Err(CredentialError::Length { bytes });
    }
    let master = keys.ok_or(CredentialError::NoKey)?.present();
    let row_key = random_key()?;
    Ok(Sealed {
        key_id: master.id.clone(),
        wrapped_key: encrypt(&master.bytes, &holder.binding(KEY_LAYER), row_key.as_slice())?,
        sealed: encrypt(&row_key, &holder.binding(PASSWORD_LAYER), password.expose().as_bytes())?,
    })
}

/// Opens a sealed password.
pub fn unseal(
    keys: Option<&MasterKeys>,
    holder: Holder<'_>,
    sealed: &Sealed,
) -> Result<Secret, CredentialError> {
    let row_key = unwrap_key(keys, holder, sealed)?;
    let text = decrypt(&row_key, &holder.binding(PASSWORD_LAYER), &sealed.sealed)?;
    let text = std::str::from_utf8(&text).map_err(|_| CredentialError::NotOurs)?;
    Ok(Secret::new(text))
}

/// The same password with its key wrapped by the present master key.
pub fn rewrap(
    keys: Option<&MasterKeys>,
    holder: Holder<'_>,
    sealed: &Sealed,
) -> Result<Sealed, CredentialError> {
    let row_key = unwrap_key(keys, holder, sealed)?;
    let master = keys.ok_or(CredentialError::NoKey)?.present();
    Ok(Sealed {
        key_id: master.id.clone(),
        wrapped_key: encrypt(&master.bytes, &holder.binding(KEY_LAYER), row_key.as_slice())?,
        sealed: sealed.sealed.clone(),
    })
}

const KEY_LAYER: &str = "key";
const PASSWORD_LAYER: &str = "password";

fn unwrap_key(
    keys: Option<&MasterKeys>,
    holder: Holder<'_>,
    sealed: &Sealed,
) -> Result<Zeroizing<[u8; KEY_BYTES]>, CredentialError> {
    let keys = keys.ok_or(CredentialError::NoKey)?;
    let master = keys
        .named(&sealed.key_id)
        .ok_or_else(|| CredentialError::OtherKey { key_id: sealed.key_id.clone() })?;
    let key = decrypt(&master.bytes, &holder.binding(KEY_LAYER), &sealed.wrapped_key)?;
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    if key.len() != KEY_BYTES {
        return Err(CredentialError::NotOurs);
    }
    bytes.copy_from_slice(&key);
    Ok(bytes)
}

fn random_key() -> Result<Zeroizing<[u8; KEY_BYTES]>, CredentialError> {
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    SystemRandom::new().fill(bytes.as_mut_slice()).map_err(|_| CredentialError::NoRandom)?;
    Ok(bytes)
}

fn cipher(key: &[u8; KEY_BYTES]) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, key).expect("AES-256 takes keys of 32 bytes");
    LessSafeKey::new(key)
}

fn encrypt(
    key: &[u8; KEY_BYTES],
    binding: &[u8],
    plain: &[u8],
) -> Result<Vec<u8>, CredentialError> {
    let mut nonce = [0; NONCE_LEN];
    SystemRandom::new().fill(&mut nonce).map_err(|_| CredentialError::NoRandom)?;
    let mut body = plain.to_vec();
    cipher(key)
        .seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(binding),
            &mut body,
        )
        .expect("a password is far shorter than what AES-GCM can seal");
    let mut whole = nonce.to_vec();
    whole.append(&mut body);
    Ok(whole)
}

fn decrypt(
    key: &[u8; KEY_BYTES],
    binding: &[u8],
    whole: &[u8],
) -> Result<Zeroizing<Vec<u8>>, CredentialError> {
    let (nonce, body) = whole.split_first_chunk::<NONCE_LEN>().ok_or(CredentialError::NotOurs)?;
    let mut body = Zeroizing::new(body.to_vec());
    let nonce = Nonce::assume_unique_for_key(*nonce);
    let length = cipher(key)
        .open_in_place(nonce, Aad::from(binding), &mut body)
        .map_err(|_| CredentialError::NotOurs)?
        .len();
    body.truncate(length);
    Ok(body)
}

#[cfg(test)]
#[path = "credentials_tests.rs"]
mod tests;
