//! Postgres over TLS, as `sslmode` in the database's URL asks for it.
//!
//! The server that `./run setup` gets is built without TLS; a front stands before it that speaks TLS as
//! Postgres does, so that our side of it is the real one.

use devstack::shared_postgres;
use lockstep_tests::world::{CliOutput, run_lockstep};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

/// What a client of Postgres says first if it wants TLS.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];

/// A certificate for localhost, and a front with it.
async fn tls_front(to: SocketAddr) -> (SocketAddr, String) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut first = [0; 8];
                client.read_exact(&mut first).await?;
                assert_eq!(first, SSL_REQUEST, "not a word in the clear");
                client.write_all(b"S").await?;
                let mut client = acceptor.accept(client).await?;
                let mut server = TcpStream::connect(to).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    (addr, cert.pem())
}

/// The database of this URL at another place, with these words about TLS.
fn url_at(url: &str, port: u16, words: &str) -> String {
    let (before, after) = url.rsplit_once('@').unwrap();
    let (_, database) = after.split_once('/').unwrap();
    format!("{before}@localhost:{port}/{database}?{words}")
}

async fn accounts(url: &str) -> CliOutput {
    run_lockstep(&["account", "list", "--json"], &[("LOCKSTEP_DATABASE_URL", url)]).await
}

#[tokio::test]
async fn the_database_is_reached_over_tls_if_its_certificate_is_known_and_not_otherwise() {
    let url = shared_postgres().await.unwrap().create_database("tls").await.unwrap();
    lockstep::database::migrate(&url).await.unwrap();
    let server: SocketAddr = shared_postgres().await.unwrap().addr();
    let (front, certificate) = tls_front(server).await;
    let home = tempfile::tempdir().unwrap();
    let pem = |name: &str, text: &str| -> PathBuf {
        let path = home.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (_, other) = tls_front(server).await;
    let known =
        format!("sslmode=verify-full&sslrootcert={}", pem("known.pem", &certificate).display());
    let strange = format!("sslmode=verify-full&sslrootcert={}", pem("other.pem", &other).display());

    let output = accounts(&url_at(&url, front.port(), &known)).await;
    assert_eq!((output.code, output.stdout.trim()), (Some(0), "[]"), "{output:?}");
    for (port, words) in [
        (front.port(), strange.as_str()),
        (front.port(), "sslmode=verify-full"),
        // A server that speaks no TLS is not talked to in the clear.
        (server.port(), "sslmode=require"),
        (server.port(), known.as_str()),
    ] {
        let output = accounts(&url_at(&url, port, words)).await;
        assert_eq!(output.code, Some(3), "{words}: {output:?}");
    }
}
