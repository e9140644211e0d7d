//! One who asks over HTTP: a node's API with a token, its metrics page, a Prometheus.
//!
//! Every answer to a request that the description has must be one that the description has as well: its
//! status, and the reason of a 503. So each test that asks holds the document to what nodes answer.

use crate::world::{SOON, until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::LazyLock;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// Who is asked, and what is shown to it.
#[derive(Debug, Clone)]
pub struct Client {
    address: String,
    token: Option<String>,
}

/// What was answered.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The headers, by their names in lower case.
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: String,
}

impl Answer {
    /// The body, which must be JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("not JSON ({e}): {self:?}"))
    }

    /// Must be a refusal with this status, whose detail holds this text.
    pub fn assert_problem(&self, status: u16, part: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.headers["content-type"], "application/problem+json", "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], status, "{self:?}");
        let kind = problem["type"].as_str().unwrap();
        assert!(kind.starts_with("urn:lockstep:problem:"), "{self:?}");
        assert!(!problem["title"].as_str().unwrap().is_empty(), "{self:?}");
        assert!(problem["detail"].as_str().unwrap().contains(part), "{part:?} is not in {self:?}");
        if status == 503 {
            self.headers["retry-after"].parse::<u32>().unwrap();
            assert!(problem["reason"].is_string(), "{self:?}");
        }
    }
}

impl Client {
    /// A free address, for `LOCKSTEP_API_LISTEN`.
    pub async fn free() -> Client {
        Client::at(devstack::free_address().unwrap())
    }

    /// Somebody who listens there.
    pub fn at(address: SocketAddr) -> Client {
        Client { address: address.to_string(), token: None }
    }

    /// The address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The same with this token.
    #[must_use]
    pub fn with(&self, token: &str) -> Client {
        Client { token: Some(token.to_owned()), ..self.clone() }
    }

    /// The same without one.
    #[must_use]
    pub fn without(&self) -> Client {
        Client { token: None, ..self.clone() }
    }

    /// Waits until somebody listens.
    pub async fn until_there(&self) {
        until("the API listens", SOON, async || TcpStream::connect(&self.address).await.ok()).await;
    }

    /// Asks for something.
    pub async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], None).await
    }

    /// Sets something.
    pub async fn put(&self, path: &str, body: &str) -> Answer {
        self.ask("PUT", path, &[("Content-Type", "application/json")], Some(body)).await
    }

    /// Asks, with headers of its own.
    pub async fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&str>,
    ) -> Answer {
        let answer = self.try_ask(method, path, headers, body).await.unwrap();
        assert_described(method, path, &answer);
        answer
    }

    /// Asks somebody who may not be there.
    ///
    /// Errors: why there is no answer.
    pub async fn try_ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&str>,
    ) -> Result<Answer, String> {
        let exchange = async {
            let mut socket = self.send(method, path, headers, body).await?;
            let mut bytes = Vec::new();
            socket.read_to_end(&mut bytes).await?;
            Ok::<_, std::io::Error>(bytes)
        };
        let why = |error: String| format!("{method} {}{path}: {error}", self.address);
        let bytes = tokio::time::timeout(SOON, exchange).await;
        let bytes = bytes.map_err(|_| why(format!("no answer within {SOON:?}")))?;
        parse(&bytes.map_err(|error| why(error.to_string()))?)
            .ok_or_else(|| why("no HTTP".to_owned()))
    }

    /// Sends a request, and leaves the answer to be read.
    ///
    /// Errors: nobody listens.
    pub async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&str>,
    ) -> std::io::Result<TcpStream> {
        let mut text = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\n", self.address);
        if let Some(token) = &self.token {
            text += &format!("Authorization: Bearer {token}\r\n");
        }
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        let body = body.unwrap_or_default();
        if !body.is_empty() {
            text += &format!("Content-Length: {}\r\n", body.len());
        }
        text += &format!("Connection: close\r\n\r\n{body}");
        let mut socket = TcpStream::connect(&self.address).await?;
        // One that is refused for its size is answered before all of it is taken.
        let _refused = socket.write_all(text.as_bytes()).await;
        Ok(socket)
    }

    /// Follows the stream of events.
    pub async fn follow(&self, path: &str, headers: &[(&str, &str)]) -> Events {
        Events { lines: BufReader::new(self.send("GET", path, headers, None).await.unwrap()) }
    }
}

/// What the nodes say of their API.
pub fn description() -> &'static Value {
    static DESCRIPTION: LazyLock<Value> = LazyLock::new(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../node/openapi.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    });
    &DESCRIPTION
}

fn assert_described(method: &str, path: &str, answer: &Answer) {
    let path = path.split('?').next().unwrap_or_default();
    let parts = |path: &str| path.split('/').map(str::to_owned).collect::<Vec<_>>();
    let is_template = |template: &str| {
        let (wanted, given) = (parts(template), parts(path));
        wanted.len() == given.len()
            && wanted.iter().zip(&given).all(|(w, g)| w == g || w.starts_with('{'))
    };
    let paths = description()["paths"].as_object().unwrap();
    let methods = paths.iter().find(|(template, _)| is_template(template));
    let Some(operation) = methods.and_then(|(_, all)| all.get(method.to_lowercase())) else {
        return;
    };
    let described = &operation["responses"][answer.status.to_string()];
    assert!(described.is_object(), "{method} {path}: not described: {answer:?}");
    if answer.status == 503 {
        let reason = format!("`{}`", answer.json()["reason"].as_str().unwrap());
        let means = described["description"].as_str().unwrap();
        assert!(means.contains(&reason), "{method} {path}: {reason} is not described: {means}");
    }
}

/// Server-sent events, as they come.
#[derive(Debug)]
pub struct Events {
    lines: BufReader<TcpStream>,
}

/// One of them.
#[derive(Debug, Default)]
pub struct SentEvent {
    /// What it is.
    pub event: String,
    /// Where the stream was.
    pub id: String,
    /// Its data.
    pub data: Value,
}

impl Events {
    /// The next one.
    pub async fn next(&mut self) -> SentEvent {
        let mut sent = SentEvent::default();
        loop {
            let mut line = String::new();
            let read = self.lines.read_line(&mut line);
            let read = tokio::time::timeout(SOON, read).await.expect("an event").unwrap();
            assert!(read > 0, "the stream has ended");
            let line = line.trim_end();
            if let Some(event) = line.strip_prefix("event: ") {
                sent.event = event.to_owned();
            } else if let Some(id) = line.strip_prefix("id: ") {
                sent.id = id.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                sent.data = serde_json::from_str(data).unwrap();
            } else if line.is_empty() && !sent.event.is_empty() {
                return sent;
            }
        }
    }
}

fn parse(bytes: &[u8]) -> Option<Answer> {
    let (head, body) = split_at(bytes, b"\r\n\r\n")?;
    let mut lines = str::from_utf8(head).ok()?.lines();
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let is_chunked = headers.get("transfer-encoding").is_some_and(|how| how == "chunked");
    let body = if is_chunked { joined(body)? } else { body.to_owned() };
    Some(Answer { status, headers, body: String::from_utf8(body).ok()? })
}

/// Chunks, up to the empty one: one that was cut off is no answer.
fn joined(mut chunks: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let (size, rest) = split_at(chunks, b"\r\n")?;
        let size = usize::from_str_radix(str::from_utf8(size).ok()?, 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        body.extend(rest.get(..size)?);
        chunks = rest.get(size..)?.strip_prefix(b"\r\n")?;
    }
}

fn split_at<'a>(bytes: &'a [u8], mark: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = bytes.windows(mark.len()).position(|window| window == mark)?;
    Some((&bytes[..at], &bytes[at + mark.len()..]))
}
