use super::*;

fn keys(lines: &[&MasterKey]) -> MasterKeys {
    let lines: Vec<String> = lines.iter().map(|key| key.to_line().to_string()).collect();
    MasterKeys::parse(&lines.join("\n")).unwrap()
}

fn holder(account: u64, platform: &str) -> Holder<'_> {
    Holder { account: AccountId::new(account).unwrap(), platform }
}

#[test]
fn sealed_password_opens_for_its_account_and_looks_like_nothing() {
    let keys = keys(&[&MasterKey::random().unwrap()]);
    let password = Secret::new("correct horse");
    let sealed = seal(Some(&keys), holder(7, "paper"), &password).unwrap();
    assert_eq!(unseal(Some(&keys), holder(7, "paper"), &sealed).unwrap(), password);
    assert_eq!(sealed.wrapped_key.len(), 12 + 32 + 16);
    assert_eq!(sealed.sealed.len(), 12 + "correct horse".len() + 16);
    let again = seal(Some(&keys), holder(7, "paper"), &password).unwrap();
    assert_ne!((again.sealed, again.wrapped_key), (sealed.sealed.clone(), sealed.wrapped_key));
    assert!(!sealed.sealed.windows(7).any(|part| part == b"correct"));
}

#[test]
fn row_of_another_account_or_platform_does_not_open() {
    let keys = keys(&[&MasterKey::random().unwrap()]);
    let sealed = seal(Some(&keys), holder(7, "paper"), &Secret::new("p")).unwrap();
    for other in [holder(8, "paper"), holder(7, "mt5")] {
        assert_eq!(unseal(Some(&keys), other, &sealed), Err(CredentialError::NotOurs));
        assert_eq!(rewrap(Some(&keys), other, &sealed), Err(CredentialError::NotOurs));
    }
}

#[test]
fn any_changed_bit_and_any_missing_byte_is_noticed() {
    let keys = keys(&[&MasterKey::random().unwrap()]);
    let whole = seal(Some(&keys), holder(7, "paper"), &Secret::new("p")).unwrap();
    let opened = |sealed: &Sealed| unseal(Some(&keys), holder(7, "paper"), sealed);
    for at in 0..whole.sealed.len() * 8 {
        let mut broken = whole.clone();
        broken.sealed[at / 8] ^= 1 << (at % 8);
        assert_eq!(opened(&broken), Err(CredentialError::NotOurs), "bit {at} of the password");
    }
    for at in 0..whole.wrapped_key.len() * 8 {
        let mut broken = whole.clone();
        broken.wrapped_key[at / 8] ^= 1 << (at % 8);
        assert_eq!(opened(&broken), Err(CredentialError::NotOurs), "bit {at} of the key");
    }
    for length in 0..whole.sealed.len() {
        let short = Sealed { sealed: whole.sealed[..length].to_vec(), ..whole.clone() };
        assert_eq!(opened(&short), Err(CredentialError::NotOurs), "{length} bytes");
    }
    // The two layers are no substitutes for each other.
    let swapped = Sealed { sealed: whole.wrapped_key.clone(), ..whole };
    assert_eq!(opened(&swapped), Err(CredentialError::NotOurs));
}

#[test]
fn rotation_leaves_the_password_sealed_and_needs_the_old_key_until_it_is_done() {
    let (old, new) = (MasterKey::random().unwrap(), MasterKey::random().unwrap());
    let before = keys(&[&old]);
    let both = keys(&[&new, &old]);
    let after = keys(&[&new]);
    let sealed = seal(Some(&before), holder(7, "paper"), &Secret::new("p")).unwrap();
    assert_eq!(unseal(Some(&both), holder(7, "paper"), &sealed).unwrap(), Secret::new("p"));
    let missing = CredentialError::OtherKey { key_id: old.id().to_owned() };
    assert_eq!(unseal(Some(&after), holder(7, "paper"), &sealed), Err(missing));
    let rotated = rewrap(Some(&both), holder(7, "paper"), &sealed).unwrap();
    assert_eq!(rotated.key_id, new.id());
    assert_eq!(rotated.sealed, sealed.sealed);
    assert_eq!(unseal(Some(&after), holder(7, "paper"), &rotated).unwrap(), Secret::new("p"));
    assert!(unseal(Some(&before), holder(7, "paper"), &rotated).is_err());
    assert_eq!(unseal(None, holder(7, "paper"), &rotated), Err(CredentialError::NoKey));
}

#[test]
fn password_that_is_empty_or_too_long_is_refused() {
    let keys = keys(&[&MasterKey::random().unwrap()]);
    for bytes in [0, PASSWORD_BYTES_MAX + 1] {
        let password = Secret::new("x".repeat(bytes));
        let refused = seal(Some(&keys), holder(7, "paper"), &password);
        assert_eq!(refused, Err(CredentialError::Length { bytes }));
    }
    let longest = Secret::new("x".repeat(PASSWORD_BYTES_MAX));
    assert!(seal(Some(&keys), holder(7, "paper"), &longest).is_ok());
}

#[test]
fn key_file_takes_comments_and_names_the_line_that_is_wrong_and_never_shows_it() {
    let key = MasterKey::random().unwrap();
    let line = key.to_line();
    let text = format!("# made today\n\n  {}  \n", *line);
    assert_eq!(MasterKeys::parse(&text).unwrap().present().id(), key.id());
    for (text, wrong) in [
        (format!("{}\n{}0", *line, *line), KeyError::Line { line: 2 }),
        (line[1..].to_owned(), KeyError::Line { line: 1 }),
        (line.replace(&line[..1], "g"), KeyError::Line { line: 1 }),
        ("# nothing".to_owned(), KeyError::Count { keys: 0 }),
        (vec![line.to_string(); KEYS_MAX + 1].join("\n"), KeyError::Count { keys: KEYS_MAX + 1 }),
    ] {
        let error = MasterKeys::parse(&text).unwrap_err();
        assert_eq!(error, wrong);
        assert!(!error.to_string().contains(&line[1..20]));
    }
    let shown = format!("{:?} {:?}", MasterKeys::parse(&line).unwrap(), Secret::new("hunter2"));
    assert!(!shown.contains(&line[..8]) && !shown.contains("hunter2"), "{shown}");
}

// With one nonce twice under one key, AES-GCM hides nothing and proves nothing.
#[test]
fn no_two_seals_share_a_nonce_and_no_two_rows_a_key() {
    let keys = keys(&[&MasterKey::random().unwrap()]);
    let seal = || seal(Some(&keys), holder(7, "paper"), &Secret::new("p")).unwrap();
    let (one, two) = (seal(), seal());
    let again = rewrap(Some(&keys), holder(7, "paper"), &one).unwrap();
    let nonces = [&one.wrapped_key, &one.sealed, &two.wrapped_key, &two.sealed, &again.wrapped_key];
    let nonces: std::collections::BTreeSet<&[u8]> =
        nonces.iter().map(|whole| &whole[..NONCE_LEN]).collect();
    assert_eq!(nonces.len(), 5);
    let row_key = |sealed: &Sealed| unwrap_key(Some(&keys), holder(7, "paper"), sealed).unwrap();
    assert_ne!(row_key(&one), row_key(&two));
    assert_ne!(row_key(&one), keys.present().bytes, "who once had the master key has the password");
    assert_eq!(row_key(&one), row_key(&again));
}

// Whatever key they are under: what was sealed as one layer does not open as the other.
#[test]
fn what_was_sealed_as_a_password_does_not_open_as_a_key() {
    let key = random_key().unwrap();
    let [as_key, as_password] =
        [KEY_LAYER, PASSWORD_LAYER].map(|layer| holder(7, "paper").binding(layer));
    let whole = encrypt(&key, &as_password, &[7; KEY_BYTES]).unwrap();
    assert!(decrypt(&key, &as_password, &whole).is_ok());
    assert_eq!(decrypt(&key, &as_key, &whole), Err(CredentialError::NotOurs));
}
