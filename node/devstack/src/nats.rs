//! A real nats-server, or some of them with routes, as children.
//!
//! Decides: when a server counts as up (it says INFO at its client port) and a cluster as joined
//! (each server has a route to each other).
//! In: [`Tools`], and configuration lines of the caller. Out: URLs, and kill, freeze, restart.
//!
//! Invariants:
//! 1. The first start takes ports the kernel chose (the server binds port 0 itself and reports
//!    what it got), so two servers never race for one.
//! 2. A restart takes the same ports, as clients expect.
//!
//! Not covered: JetStream, TLS; the caller's configuration lines may switch them on.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::guard::Scratch;
use crate::{DevstackError, ManagedProcess, ProcessSpec, Tools};

/// A start takes some 50 ms; this is for a machine that builds at the same time.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Routes come up within a second; a server that was frozen is dropped and retried first.
const ROUTES_LIMIT: Duration = Duration::from_secs(30);
/// A server says INFO at once; who does not within this time is not it.
const INFO_LIMIT: Duration = Duration::from_millis(500);
/// How often a restart is tried when somebody took the port meanwhile.
const RESTART_ATTEMPTS: u32 = 5;
const HOST: &str = "127.0.0.1";

/// One nats-server.
#[derive(Debug)]
pub struct Nats {
    process: ManagedProcess,
    folder: Scratch,
    config: Mutex<Config>,
    ports: Ports,
}

/// What its configuration file says.
#[derive(Debug, Clone)]
struct Config {
    name: String,
    /// `None`: the server takes free ones and reports them.
    ports: Option<Ports>,
    /// The routes to other servers; `None`: not in a cluster.
    routes: Option<Vec<u16>>,
    /// Whether clients are told of the other servers of the cluster.
    advertised: bool,
    extra: String,
}

#[derive(Debug, Clone, Copy)]
struct Ports {
    client: u16,
    monitoring: u16,
    /// Zero when the server is in no cluster.
    cluster: u16,
}

impl Config {
    fn text(&self, ports_folder: &str) -> String {
        // -1 is this server's word for "any free port".
        let port = |pick: fn(&Ports) -> u16| {
            self.ports.as_ref().map_or(-1, |ports| i32::from(pick(ports)))
        };
        let mut text = format!(
            "server_name: \"{}\"\nhost: \"{HOST}\"\nport: {}\nhttp: \"{HOST}:{}\"\nports_file_dir: \"{ports_folder}\"\n",
            self.name,
            port(|ports| ports.client),
            port(|ports| ports.monitoring),
        );
        if let Some(routes) = &self.routes {
            let routes: Vec<String> =
                routes.iter().map(|route| format!("\"nats-route://{HOST}:{route}\"")).collect();
            text.push_str(&format!(
                "cluster {{ name: \"lockstep\", host: \"{HOST}\", port: {}, routes: [{}], no_advertise: {} }}\n",
                port(|ports| ports.cluster),
                routes.join(", "),
                !self.advertised,
            ));
        }
        text + &self.extra + "\n"
    }
}

impl Nats {
    /// Starts one server on a free port and waits until it answers.
    pub async fn start(tools: &Tools) -> Result<Self, DevstackError> {
        Self::start_with_config(tools, "").await
    }

    /// The same, with lines for its configuration file, for example `ping_interval: "2s"`.
    pub async fn start_with_config(tools: &Tools, extra: &str) -> Result<Self, DevstackError> {
        Self::start_config(
            tools,
            Config {
                name: "nats".to_owned(),
                ports: None,
                routes: None,
                advertised: true,
                extra: extra.to_owned(),
            },
        )
        .await
    }

    async fn start_config(tools: &Tools, config: Config) -> Result<Self, DevstackError> {
        let folder = Scratch::new()?;
        write_config(&folder, &config)?;
        let process = ProcessSpec::new(&config.name, &tools.nats_server)
            .arg("-c")
            .arg(folder.join("nats.conf"))
            .current_dir(folder.path())
            .log_folder(folder.path())
            .start()?;
        let ports = process
            .wait_until("ports file", START_LIMIT, async || Ok(read_ports(&process, &folder)))
            .await?;
        await_info(&process, ports.client).await?;
        Ok(Self { process, folder, config: Mutex::new(config), ports })
    }

    /// Where clients connect.
    pub fn url(&self) -> String {
        format!("nats://{}", self.addr())
    }

    /// Where clients connect, as an address (for a proxy in between).
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.ports.client))
    }

    /// SIGKILL.
    pub fn kill(&self) -> Result<(), DevstackError> {
        self.process.kill().map(drop)
    }

    /// SIGSTOP: connections stay open and nothing moves.
    pub fn freeze(&self) -> Result<(), DevstackError> {
        self.process.freeze()
    }

    /// SIGCONT.
    pub fn thaw(&self) -> Result<(), DevstackError> {
        self.process.thaw()
    }

    /// Lame duck: it says so to its clients, after its grace time closes their connections one by
    /// one, and ends.
    pub fn lame_duck(&self) -> Result<(), DevstackError> {
        self.process.signal_user2()
    }

    /// Starts it again on the same ports (killing it first if it runs) and waits until it answers.
    pub async fn restart(&self) -> Result<(), DevstackError> {
        self.process.kill()?;
        let config = {
            let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
            config.ports = Some(self.ports);
            config.clone()
        };
        write_config(&self.folder, &config)?;
        let mut attempt = 1;
        loop {
            self.process.restart()?;
            match await_info(&self.process, self.ports.client).await {
                // Somebody's outgoing connection may sit on the port for a moment.
                Err(DevstackError::Ended { .. }) if attempt < RESTART_ATTEMPTS => attempt += 1,
                other => return other,
            }
        }
    }

    /// The last lines it logged.
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    /// Its process, for what is not offered here.
    pub fn process(&self) -> &ManagedProcess {
        &self.process
    }

    /// How many other servers it has a route to.
    async fn routed_servers(&self) -> Result<usize, DevstackError> {
        let answer = self.monitor("/routez").await?;
        let routes = answer["routes"].as_array().map(Vec::as_slice).unwrap_or_default();
        // One server is reached by several connections.
        let mut remotes: Vec<&str> =
            routes.iter().filter_map(|route| route["remote_id"].as_str()).collect();
        remotes.sort_unstable();
        remotes.dedup();
        Ok(remotes.len())
    }

    /// Reads a page of the server's monitoring port, for example `/connz?subs=1`.
    pub async fn monitor(&self, page: &str) -> Result<serde_json::Value, DevstackError> {
        let failed = |source| DevstackError::Io {
            doing: format!("{}: reading {page} of the monitoring port", self.process.name()),
            source,
        };
        let mut stream = TcpStream::connect((HOST, self.ports.monitoring)).await.map_err(failed)?;
        // HTTP/1.0: the answer comes in one piece and ends with the connection.
        let request = format!("GET {page} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.map_err(failed)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.map_err(failed)?;
        let body = answer
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
            .map_or(&[][..], |end| &answer[end + 4..]);
        serde_json::from_slice(body).map_err(|error| DevstackError::Protocol {
            name: self.process.name().to_owned(),
            what: format!("{page} of the monitoring port is not JSON: {error}"),
        })
    }
}

/// Servers that route to each other; a client may use any of them.
#[derive(Debug)]
pub struct NatsCluster {
    servers: Vec<Nats>,
}

impl NatsCluster {
    /// Starts `count` servers and waits until each has a route to each other.
    pub async fn start(tools: &Tools, count: usize) -> Result<Self, DevstackError> {
        Self::start_with_config(tools, count, "").await
    }

    /// The same, with lines for every server's configuration file.
    pub async fn start_with_config(
        tools: &Tools,
        count: usize,
        extra: &str,
    ) -> Result<Self, DevstackError> {
        Self::start_servers(tools, count, extra, true).await
    }

    /// The same; clients are not told of the other servers, so that one which is given the
    /// addresses of proxies stays behind them.
    pub async fn start_unadvertised(
        tools: &Tools,
        count: usize,
        extra: &str,
    ) -> Result<Self, DevstackError> {
        Self::start_servers(tools, count, extra, false).await
    }

    async fn start_servers(
        tools: &Tools,
        count: usize,
        extra: &str,
        advertised: bool,
    ) -> Result<Self, DevstackError> {
        let mut servers: Vec<Nats> = Vec::new();
        for number in 0..count {
            let config = Config {
                name: format!("nats-{number}"),
                ports: None,
                routes: Some(servers.iter().map(|server| server.ports.cluster).collect()),
                advertised,
                extra: extra.to_owned(),
            };
            servers.push(Nats::start_config(tools, config).await?);
        }
        // A restarted server must find the others whichever of them are up.
        let all: Vec<u16> = servers.iter().map(|server| server.ports.cluster).collect();
        for server in &servers {
            let others = all.iter().copied().filter(|port| *port != server.ports.cluster);
            server.config.lock().unwrap_or_else(PoisonError::into_inner).routes =
                Some(others.collect());
        }
        let cluster = Self { servers };
        cluster.wait_for_routes().await?;
        Ok(cluster)
    }

    /// Where clients connect, one URL a server.
    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Nats::url).collect()
    }

    /// All of them in one string, as a client's configuration takes them.
    pub fn url_list(&self) -> String {
        self.urls().join(",")
    }

    /// One server, to kill, freeze, thaw or restart it. Panics if there is no such server.
    pub fn server(&self, number: usize) -> &Nats {
        &self.servers[number]
    }

    /// The servers.
    pub fn servers(&self) -> &[Nats] {
        &self.servers
    }

    /// Waits until every server that runs has a route to every other that runs (a frozen one runs:
    /// thaw or kill it first).
    pub async fn wait_for_routes(&self) -> Result<(), DevstackError> {
        let deadline = Instant::now() + ROUTES_LIMIT;
        let running: Vec<&Nats> =
            self.servers.iter().filter(|server| server.process.pid().is_some()).collect();
        for server in &running {
            let limit = deadline.saturating_duration_since(Instant::now());
            server
                .process
                .wait_until("route to every other server", limit, async || {
                    // No answer yet is no route yet.
                    let routed = server.routed_servers().await.unwrap_or(0);
                    Ok((routed == running.len() - 1).then_some(()))
                })
                .await?;
        }
        Ok(())
    }
}

fn write_config(folder: &Scratch, config: &Config) -> Result<(), DevstackError> {
    let path = folder.join("nats.conf");
    let ports_folder = folder.path().display().to_string();
    std::fs::write(&path, config.text(&ports_folder)).map_err(|source| DevstackError::Io {
        doing: format!("writing {}", path.display()),
        source,
    })
}

fn ports_file(process: &ManagedProcess, folder: &Scratch) -> Option<PathBuf> {
    Some(folder.join(&format!("nats-server_{}.ports", process.pid()?)))
}

/// `None` while the file is not there or not whole.
fn read_ports(process: &ManagedProcess, folder: &Scratch) -> Option<Ports> {
    let text = std::fs::read(ports_file(process, folder)?).ok()?;
    let answer: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let port = |kind: &str| -> Option<u16> {
        answer[kind][0].as_str()?.rsplit(':').next()?.trim_end_matches('/').parse().ok()
    };
    Some(Ports {
        client: port("nats")?,
        monitoring: port("monitoring")?,
        cluster: if answer["cluster"].is_null() { 0 } else { port("cluster")? },
    })
}

/// Waits until the server says INFO, the first word of its protocol.
async fn await_info(process: &ManagedProcess, port: u16) -> Result<(), DevstackError> {
    process
        .wait_until("INFO at its client port", START_LIMIT, async || {
            let Ok(stream) = TcpStream::connect((HOST, port)).await else { return Ok(None) };
            let mut line = String::new();
            // A stranger on our port would say nothing, or something else.
            let mut reader = BufReader::new(stream);
            match tokio::time::timeout(INFO_LIMIT, reader.read_line(&mut line)).await {
                Ok(Ok(_)) if line.starts_with("INFO ") => Ok(Some(())),
                _ => Ok(None),
            }
        })
        .await
}
