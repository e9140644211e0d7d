//! What a cluster is made of: servers, users, and the words on their disk.

use bus::Role;
use schemas::AccountId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const PORT: u16 = 4222;
const CLUSTER_PORT: u16 = 6222;

/// Rounds of the hash: 2^10. The secrets are random, 244 bits; it need not be slow against guesses.
const HASH_COST: u32 = 10;

/// Servers and users.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cluster {
    pub(super) servers: Vec<Server>,
    pub(super) users: BTreeMap<String, User>,
    /// The day on which the servers' certificates end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) valid_until: Option<String>,
}

/// One server, as clients and the other servers reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Server {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) cluster_port: u16,
}

impl Server {
    pub(super) fn parse(text: &str) -> Result<Server, String> {
        let mut words = text.split(':');
        let host = words.next().unwrap_or_default().to_ascii_lowercase();
        let is_label = |label: &str| {
            let is_inner = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
            !label.is_empty()
                && label.bytes().all(is_inner)
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if !host.split('.').all(is_label) {
            return Err(format!("host must be a name or an IPv4 address, got {host:?}"));
        }
        let mut port = |default: u16| match words.next() {
            None => Ok(default),
            Some(word) => match word.parse::<u16>() {
                Ok(port) if port > 0 => Ok(port),
                _ => Err(format!("port must be 1 to 65535, got {word:?}")),
            },
        };
        let server = Server { host, port: port(PORT)?, cluster_port: port(CLUSTER_PORT)? };
        match words.next() {
            None => Ok(server),
            Some(rest) => Err(format!("expected HOST[:PORT[:CLUSTER_PORT]], got {rest:?} as well")),
        }
    }

    /// Its folder, and its name: ports apart where one machine has several.
    pub(super) fn folder(&self) -> String {
        format!("{}-{}", self.host, self.port)
    }
}

/// One user, as the servers know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct User {
    role: RoleWord,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    masters: BTreeSet<AccountId>,
    pub(super) secret_hash: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RoleWord {
    Node,
    Publisher,
    Monitor,
    Operator,
}

impl User {
    pub(super) fn new(role: &Role, secret: &str) -> Result<User, bcrypt::BcryptError> {
        let (role, masters) = match role {
            Role::Node => (RoleWord::Node, BTreeSet::new()),
            Role::Publisher(masters) => (RoleWord::Publisher, masters.clone()),
            Role::Monitor => (RoleWord::Monitor, BTreeSet::new()),
            Role::Operator => (RoleWord::Operator, BTreeSet::new()),
        };
        let hash = bcrypt::hash_with_result(secret, HASH_COST)?;
        Ok(User { role, masters, secret_hash: hash.format_for_version(bcrypt::Version::TwoA) })
    }

    pub(super) fn role(&self) -> Role {
        match self.role {
            RoleWord::Node => Role::Node,
            RoleWord::Publisher => Role::Publisher(self.masters.clone()),
            RoleWord::Monitor => Role::Monitor,
            RoleWord::Operator => Role::Operator,
        }
    }

    pub(super) fn role_word(&self) -> String {
        match self.role {
            RoleWord::Node => "node".to_owned(),
            RoleWord::Publisher => {
                let masters: Vec<String> = self.masters.iter().map(AccountId::to_string).collect();
                format!("publisher of {}", masters.join(", "))
            }
            RoleWord::Monitor => "monitor".to_owned(),
            RoleWord::Operator => "operator".to_owned(),
        }
    }
}

/// 244 random bits.
pub(super) fn new_secret() -> String {
    format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple())
}

impl Cluster {
    pub(super) fn new(servers: Vec<Server>) -> Result<Cluster, String> {
        for (at, server) in servers.iter().enumerate() {
            let clashes = |other: &Server| {
                let ports = [other.port, other.cluster_port];
                other.host == server.host
                    && (ports.contains(&server.port) || ports.contains(&server.cluster_port))
            };
            if server.port == server.cluster_port || servers[..at].iter().any(clashes) {
                return Err(format!(
                    "--server {}: port {} or {} is used twice",
                    server.host, server.port, server.cluster_port
                ));
            }
        }
        Ok(Cluster { servers, users: BTreeMap::new(), valid_until: None })
    }

    /// The settings of a user's process: its own secret, and what it checks the servers by.
    pub(super) fn settings_of(&self, user: &str, secret: &str, root: &Path) -> String {
        let url = |s: &Server| format!("tls://{user}:{secret}@{}:{}", s.host, s.port);
        let urls: Vec<String> = self.servers.iter().map(url).collect();
        format!(
            "LOCKSTEP_NATS_URLS={}\nLOCKSTEP_NATS_ROOT_CERTIFICATES='{}'\n",
            urls.join(","),
            root.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_a_host_and_at_most_two_ports() {
        let parsed = Server::parse("n1.example:4300").unwrap();
        assert_eq!((parsed.port, parsed.cluster_port), (4300, 6222));
        for wrong in [
            "", ":1", "..", "-a", "a..b", "a-.b", "n1:0", "n1:70000", "n1:1:2:3", "n1/x", "n 1",
            "n1:",
        ] {
            assert!(Server::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn ports_that_two_servers_would_share_are_refused() {
        let server = |text| Server::parse(text).unwrap();
        assert!(Cluster::new(vec![server("a"), server("b")]).is_ok());
        assert!(Cluster::new(vec![server("a:1:2"), server("a:3:2")]).is_err());
        assert!(Cluster::new(vec![server("a:1:2"), server("a:2:3")]).is_err());
        assert!(Cluster::new(vec![server("a:1:1")]).is_err());
    }

    #[test]
    fn a_users_secret_is_not_in_what_the_servers_get() {
        let secret = new_secret();
        let user = User::new(&Role::Monitor, &secret).unwrap();
        assert!(bcrypt::verify(&secret, &user.secret_hash).unwrap());
        assert!(!serde_json::to_string(&user).unwrap().contains(&secret));
        assert_ne!(secret, new_secret());
    }
}
