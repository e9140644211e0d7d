//! Certificates of the servers, and the files that they read.

use super::cluster::{Cluster, Server};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use std::fmt::Write;
use time::{Duration, OffsetDateTime};

/// Certificates that run out stop a fleet; `lockstep nats renew` makes new ones.
const VALID: Duration = Duration::days(3_650);
/// Machines whose clocks are behind must accept them at once.
const CLOCK_BEHIND: Duration = Duration::days(1);

/// Signs the certificates of one cluster; its key is never written.
pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    pem: String,
    valid_until: OffsetDateTime,
}

impl Authority {
    pub(super) fn new(cluster: &Cluster) -> Result<Authority, rcgen::Error> {
        let mut params = params(Vec::new(), &format!("Lockstep bus of {}", names(cluster)))?;
        let valid_until = params.not_after;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let pem = issuer.pem();
        Ok(Authority { issuer, pem, valid_until })
    }

    /// The day on which it ends, and what it signs not earlier.
    pub(super) fn valid_until(&self) -> String {
        self.valid_until.date().to_string()
    }

    /// What everybody checks the servers by.
    pub(super) fn certificate(&self) -> &str {
        &self.pem
    }

    /// Certificate and key of a server, for its clients and for the other servers.
    pub(super) fn issue(&self, server: &Server) -> Result<(String, String), rcgen::Error> {
        let mut params = params(vec![server.host.clone()], &server.folder())?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok((certificate.pem(), key.serialize_pem()))
    }
}

fn params(hosts: Vec<String>, name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name.push(DnType::CommonName, name);
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - CLOCK_BEHIND, now + VALID);
    Ok(params)
}

/// The first certificate of a file: the one that the servers' present ones are checked by.
pub(super) fn first_certificate(pem: &str) -> Option<&str> {
    const END: &str = "-----END CERTIFICATE-----";
    let from = pem.find("-----BEGIN CERTIFICATE-----")?;
    let to = from + pem[from..].find(END)? + END.len();
    Some(&pem[from..to])
}

fn names(cluster: &Cluster) -> String {
    cluster.servers.iter().map(|s| s.host.as_str()).collect::<Vec<_>>().join(", ")
}

/// `nats.conf` of a server. Paths in it begin where the server is started.
pub(super) fn conf(cluster: &Cluster, server: &Server) -> String {
    let others = cluster.servers.iter().filter(|other| *other != server);
    let routes: Vec<String> = others
        .map(|other| format!("    \"nats-route://{}:{}\"\n", other.host, other.cluster_port))
        .collect();
    let Server { host, port, cluster_port } = server;
    format!(
        "# Made by `lockstep nats init`. Start it in this folder: nats-server -c nats.conf\n\
         server_name: \"{name}\"\n\
         host: \"0.0.0.0\"\n\
         port: {port}\n\
         # Clients are told of the other servers by the names that are in their certificates.\n\
         client_advertise: \"{host}:{port}\"\n\
         tls {{ cert_file: \"cert.pem\", key_file: \"key.pem\", ca_file: \"ca.pem\", timeout: 5 }}\n\
         cluster {{\n  \
           name: \"lockstep\"\n  \
           host: \"0.0.0.0\"\n  \
           port: {cluster_port}\n  \
           # A server of this cluster, or nobody.\n  \
           tls {{ cert_file: \"cert.pem\", key_file: \"key.pem\", ca_file: \"ca.pem\", verify: true, timeout: 5 }}\n  \
           routes: [\n{routes}  ]\n  \
           no_advertise: false\n\
         }}\n\
         include \"users.conf\"\n",
        name = server.folder(),
        routes = routes.concat(),
    )
}

/// `users.conf`: who may say and hear what. Whoever is not in it gets no connection.
pub(super) fn users_conf(cluster: &Cluster) -> String {
    let mut text = "# Made by `lockstep nats`, which writes it anew.\n".to_owned();
    text.push_str("authorization {\n  timeout: 5\n  users: [\n");
    for (name, user) in &cluster.users {
        let subjects = user.role().subjects(name);
        let allow = |subjects: &[String]| match subjects {
            // An empty list would allow everything.
            [] => "{ deny: [\">\"] }".to_owned(),
            some => format!("{{ allow: {some:?} }}"),
        };
        // A String takes every write.
        let _ = writeln!(
            text,
            "    # {}\n    {{ user: {name:?}, password: {:?}, permissions: {{\n      publish: {}\n      subscribe: {}",
            user.role_word(),
            user.secret_hash,
            allow(&subjects.publish),
            allow(&subjects.subscribe),
        );
        text.push_str("    } }\n");
    }
    text.push_str("  ]\n}\n");
    text
}
