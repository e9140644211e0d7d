//! An error in one line, for logs and for whoever reads a verb's answer.
//!
//! Every log line of this crate that tells an error tells it through [`with_causes`]: by itself an error
//! names what failed and leaves out why, or shows a line of the server's source.

use sqlx::postgres::PgDatabaseError;
use std::error::Error;

/// An error with everything that led to it, without saying anything twice.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut own_words = in_own_words(error);
    let mut cause = error.source();
    while let Some(deeper) = cause {
        let words = deeper.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        own_words = own_words.or_else(|| in_own_words(deeper));
        cause = deeper.source();
    }
    match own_words {
        Some((shown, own)) => text.replace(&shown, &own),
        None => text,
    }
}

/// What an error of Postgres is shown as, and what the server said: the client adds the line of the
/// server's own source, which looks like one of the reader's.
fn in_own_words(error: &(dyn Error + 'static)) -> Option<(String, String)> {
    let refusal = match error.downcast_ref::<sqlx::Error>() {
        Some(error) => error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?,
        None => error.downcast_ref::<PgDatabaseError>()?,
    };
    Some((refusal.to_string(), refusal.message().to_owned()))
}

/// Refusals of a database for tests that need no database.
#[cfg(test)]
pub(crate) mod fake {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// A refusal of a server that says this SQLSTATE, and the line of its own source.
    pub(crate) async fn refusal(state: &str) -> sqlx::Error {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("postgres://u@{}/x?sslmode=disable", listener.local_addr().unwrap());
        let fields = format!("SFATAL\0VFATAL\0C{state}\0Mit may not be\0Faclchk.c\0L2793\0\0");
        let serve = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            let _start = socket.read(&mut [0; 1024]).await.unwrap();
            let length = u32::try_from(fields.len() + 4).unwrap().to_be_bytes();
            let message = [&b"E"[..], &length, fields.as_bytes()].concat();
            socket.write_all(&message).await.unwrap();
            socket
        };
        let (_socket, connected) = tokio::join!(serve, crate::database::connect(&url, "test"));
        match connected.unwrap_err() {
            crate::database::DatabaseError::Connect(error) => error,
            other => panic!("{other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::CliError;
    use std::path::{Path, PathBuf};

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    #[test]
    fn every_error_in_a_log_line_is_told_with_its_causes() {
        let mut found = Vec::new();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        sources(&folder, &mut found);
        assert!(found.len() > 100, "{found:?}");
        // Spelt in two, so that this file has none.
        let bare = concat!("%", "error");
        let mut wrong = Vec::new();
        for path in &found {
            let text = std::fs::read_to_string(path).unwrap();
            let lines = text.lines().enumerate().filter(|(_, line)| line.contains(bare));
            wrong.extend(lines.map(|(at, line)| format!("{}:{}: {line}", path.display(), at + 1)));
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
    use crate::database::DatabaseError;

    #[tokio::test]
    async fn a_refusal_of_the_database_ends_without_a_line_of_its_source() {
        let bare = fake::refusal("42501").await;
        assert!(bare.to_string().ends_with("it may not be at line 2793"), "{bare}");
        assert_eq!(with_causes(&bare), "error returned from database: it may not be");
        let told = CliError::from(bare);
        let expected = "database: error returned from database: it may not be";
        assert_eq!(with_causes(&told), expected);
        let connect = DatabaseError::Connect(fake::refusal("42501").await);
        let expected =
            "cannot connect to the database: error returned from database: it may not be";
        assert_eq!(with_causes(&connect), expected);
    }
}
