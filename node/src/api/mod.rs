//! The HTTP interface of a node: see and operate the fleet.
//!
//! In: requests with a bearer token. Out: JSON, problem details (RFC 9457), server-sent events. The
//! description is `openapi.json`, made from the handlers; a test holds it to them.
//!
//! It is off unless `LOCKSTEP_API_LISTEN` names an address. It has a thread, a runtime and database
//! connections of its own: nothing that its clients do is in the way of an order, a row or a lease
//! cycle.
//!
//! Invariants:
//! 1. Everything under `/v1` needs a token: one of `read` for what is seen, one of `operate` for what
//!    is done, one of `admin` for tokens and hand-overs. `/livez` and `/readyz` need none, and say
//!    nothing but a word.
//! 2. Everything is bounded: connections, requests at once, streams, bodies, rows of an answer, the
//!    time of a request, of a query, of a client that stands still.
//! 3. A database that is away makes 503 with `Retry-After`, whatever was asked; `/livez` does not ask
//!    it.
//! 4. No answer holds a secret: of an account's connection there is the address and the login.
//!
//! Not covered: TLS. The listener is for a private address, or for a proxy that has a certificate.
//! Several operators in one fleet, who must not see each other's accounts (H77): a fleet is one's.

mod act;
mod administer;
mod auth;
mod extract;
mod given;
mod keys;
mod listen;
pub mod metrics;
mod positions;
mod problem;
mod read;
mod refusals;
mod stream;
pub mod tokens;
mod uptime;

pub use listen::{CONNECTIONS_MAX, HEADER_LIMIT, WRITE_LIMIT};
pub use stream::{STREAM_LIMIT, STREAMS_MAX};

use crate::account::session::NodeContext;
use crate::causes::with_causes;
use crate::config::NodeConfig;
use crate::database;
use crate::lease::{LeaseState, trusted};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use keys::Keys;
use listen::Patience;
use problem::Problem;
use refusals::ProbeRefusals;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{PgConnection, Postgres};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot, watch};
use utoipa::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Requests that are worked on at once; more are refused with 503.
pub const REQUESTS_MAX: usize = 32;
/// The longest that one may take; a close waits for its broker in that.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(15);
/// Connections to the database.
const DATABASE_CONNECTIONS_MAX: u32 = 4;
/// The longest wait for one of them, connecting included.
const DATABASE_WAIT: Duration = Duration::from_secs(2);
/// The longest that one statement may run, by the database's own watch.
const STATEMENT_LIMIT_MS: &str = "4000";
/// So many cycles without a confirmed one, and the node is not ready any more, even where its permits
/// last longer.
const CYCLES_MISSED_MAX: u32 = 3;

/// What the handlers share.
#[derive(Debug)]
pub(super) struct ApiState {
    context: Arc<NodeContext>,
    lease: watch::Receiver<Arc<LeaseState>>,
    pool: PgPool,
    keys: Keys,
    requests: Semaphore,
    comparisons: Semaphore,
    streams: Arc<Semaphore>,
}

impl ApiState {
    async fn database(&self) -> Result<Held, Problem> {
        Ok(Held(Some(self.pool.acquire().await?)))
    }
}

/// A connection of the pool. Unless it is given back, it is closed: whatever ended the request, an
/// answer that is still to come must not be taken for the next one's, or hold the connection for ever.
struct Held(Option<PoolConnection<Postgres>>);

impl Held {
    fn give_back(mut self) {
        drop(self.0.take());
    }
}

impl std::ops::Deref for Held {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.0.as_ref().expect("it is there until it is given back")
    }
}

impl std::ops::DerefMut for Held {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.0.as_mut().expect("it is there until it is given back")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(connection.detach());
        }
    }
}

/// The API of this process; it ends with this value.
#[derive(Debug)]
pub struct Api {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    address: SocketAddr,
}

impl Api {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the API ended by a bug");
        }
    }
}

/// Why the API could not begin.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The address cannot be had, or the system gives no thread.
    #[error(transparent)]
    System(#[from] std::io::Error),
    /// The database's URL is none.
    #[error(transparent)]
    Database(#[from] database::DatabaseError),
}

/// Begins to listen.
pub fn start(
    listen: SocketAddr,
    context: Arc<NodeContext>,
    lease: watch::Receiver<Arc<LeaseState>>,
) -> Result<Api, ApiError> {
    let socket = TcpListener::bind(listen)?;
    socket.set_nonblocking(true)?;
    let address = socket.local_addr()?;
    let options = database::options(context.config.database_url.expose(), "api")?
        .options([("statement_timeout", STATEMENT_LIMIT_MS)]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("lockstep-api".into()).spawn(move || {
        runtime.block_on(async move {
            let pool = PgPoolOptions::new()
                .max_connections(DATABASE_CONNECTIONS_MAX)
                .acquire_timeout(DATABASE_WAIT)
                .connect_lazy_with(options);
            let state = Arc::new(ApiState {
                context,
                lease,
                pool,
                keys: Keys::default(),
                requests: Semaphore::new(REQUESTS_MAX),
                comparisons: Semaphore::new(positions::COMPARISONS_MAX),
                streams: Arc::new(Semaphore::new(STREAMS_MAX)),
            });
            match tokio::net::TcpListener::from_std(socket) {
                Ok(listener) => {
                    tracing::info!(%address, "API listens");
                    tokio::select! {
                        () = listen::serve(listener, router(state), Patience::default()) => {}
                        _ = stopped => {}
                    }
                }
                Err(error) => {
                    tracing::error!(error = %with_causes(&error), "the API cannot listen")
                }
            }
        });
        // What clients still read must not hold up the end of the node.
        runtime.shutdown_background();
    })?;
    Ok(Api { stop: Some(stop), thread: Some(thread), address })
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Lockstep",
        description = "See and operate a fleet of trade copiers. Every node answers for the whole fleet; a close goes to the node that has the account."
    ),
    components(schemas(problem::Problem)),
    modifiers(&Described),
    tags(
        (name = "see", description = "What there is; needs a token of scope `read`"),
        (name = "act", description = "What can be done; needs a token of scope `operate`"),
        (name = "probe", description = "Whether the node lives and works; needs no token"),
        (name = "administer", description = "Who may use the API, and which node has an account; needs a token of scope `admin`"),
    )
)]
struct Description;

struct Described;

impl utoipa::Modify for Described {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        api.components.get_or_insert_default().add_security_scheme("token", bearer);
        let any =
            utoipa::openapi::security::SecurityRequirement::new::<_, [&str; 0], &str>("token", []);
        api.security = Some(vec![any]);
    }
}

/// Everything that a token is needed for.
fn with_token() -> OpenApiRouter<Arc<ApiState>> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(read::accounts))
        .routes(routes!(read::links))
        .routes(routes!(read::nodes))
        .routes(routes!(read::fleet))
        .routes(routes!(read::pairs))
        .routes(routes!(read::events))
        .routes(routes!(read::why))
        .routes(routes!(positions::positions))
        .routes(routes!(uptime::uptime))
        .routes(routes!(uptime::minutes))
        .routes(routes!(stream::stream))
        .routes(routes!(act::link_mode))
        .routes(routes!(act::account_mode))
        .routes(routes!(act::fleet_mode))
        .routes(routes!(act::close))
        .routes(routes!(administer::list))
        .routes(routes!(administer::revoke))
        .routes(routes!(administer::release))
}

/// What anybody may ask.
fn without_token() -> OpenApiRouter<Arc<ApiState>> {
    OpenApiRouter::new().routes(routes!(livez)).routes(routes!(readyz))
}

fn router(state: Arc<ApiState>) -> Router {
    let (v1, _) = with_token().split_for_parts();
    let (probes, _) = without_token().split_for_parts();
    v1.method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(Arc::clone(&state), auth::authorize))
        .layer(middleware::from_fn_with_state(Arc::clone(&state), bounded))
        .merge(probes)
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(nothing_there)
        .layer(middleware::from_fn(plain))
        .layer(middleware::from_fn(metrics::measured))
        .with_state(state)
}

/// Not more at once than there is room for, and none for ever.
async fn bounded(State(api): State<Arc<ApiState>>, request: Request, next: Next) -> Response {
    let Ok(_room) = api.requests.try_acquire() else {
        let detail = format!("{REQUESTS_MAX} requests are worked on already");
        return Problem::unavailable(Problem::BUSY, detail, 1).into_response();
    };
    match tokio::time::timeout(REQUEST_LIMIT, next.run(request)).await {
        Ok(response) => response,
        Err(_elapsed) => Problem::unavailable(
            Problem::SLOW,
            format!("not done within {REQUEST_LIMIT:?}"),
            problem::RETRY_AFTER_S,
        )
        .into_response(),
    }
}

/// No answer is for a cache, or for a browser to guess at.
async fn plain(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

async fn nothing_there(uri: Uri) -> Problem {
    Problem::not_found(format!("there is nothing at {}", uri.path()))
}

async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    Problem::method(format!("{method} is nothing that {} knows", uri.path()))
}

/// Whether the process runs. Nothing else is looked at: a node without a database must not be restarted.
#[utoipa::path(get, path = "/livez", tag = "probe", security(()),
    responses((status = 200, description = "It does: `ok`", content_type = "text/plain", body = String)))]
async fn livez() -> &'static str {
    "ok\n"
}

/// Whether the node can do its work: a lease cycle was confirmed so lately that orders may leave, and the bus
/// is there.
#[utoipa::path(get, path = "/readyz", tag = "probe", security(()),
    responses((status = 200, description = "It can: `ok`", content_type = "text/plain", body = String), ProbeRefusals))]
async fn readyz(State(api): State<Arc<ApiState>>) -> Result<&'static str, Problem> {
    let missing = not_ready(&api);
    if missing.is_empty() {
        return Ok("ok\n");
    }
    let detail = format!("not there: {}", missing.join(", "));
    Err(Problem::unavailable(Problem::NOT_READY, detail, problem::RETRY_AFTER_S))
}

/// How long after a confirmed cycle began the node is ready: no longer than an order may leave.
fn ready_for(config: &NodeConfig) -> Duration {
    let permitted = trusted(config.lease, config.fence).saturating_sub(config.send_reserve);
    permitted.min(config.cycle * CYCLES_MISSED_MAX)
}

fn not_ready(api: &ApiState) -> Vec<&'static str> {
    let lease = api.lease.borrow();
    let now = api.context.clock.now();
    let is_confirmed = lease.permits(now, ready_for(&api.context.config));
    let is_connected =
        api.context.bus.connection_state() == async_nats::connection::State::Connected;
    [(!is_confirmed, "lease"), (!is_connected, "bus")]
        .into_iter()
        .filter_map(|(is_missing, what)| is_missing.then_some(what))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The description of all there is.
    fn described() -> utoipa::openapi::OpenApi {
        with_token().merge(without_token()).into_openapi()
    }

    /// Path, method and tag of everything that is described.
    fn operations() -> Vec<(String, String, String)> {
        let api = serde_json::to_value(described()).unwrap();
        let mut all = Vec::new();
        for (path, methods) in api["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let tag = operation["tags"][0].as_str().unwrap().to_owned();
                all.push((path.clone(), method.clone(), tag));
            }
        }
        all
    }

    #[test]
    fn what_is_described_as_for_admins_is_for_admins_and_looking_is_apart_from_doing() {
        let mut for_admins = BTreeSet::new();
        for (path, method, tag) in operations() {
            match tag.as_str() {
                "administer" => drop(for_admins.insert(path)),
                "see" | "probe" => assert_eq!(method, "get", "{path}"),
                "act" => assert_ne!(method, "get", "{path}"),
                other => panic!("{path}: {other}"),
            }
        }
        let needed: BTreeSet<String> = auth::FOR_ADMINS.iter().map(|p| (*p).to_owned()).collect();
        assert_eq!(for_admins, needed);
    }

    #[test]
    fn a_token_is_needed_for_everything_but_the_probes() {
        let api = serde_json::to_value(described()).unwrap();
        assert_eq!(api["security"], serde_json::json!([{ "token": [] }]));
        for (path, method, tag) in operations() {
            let own = &api["paths"][&path][&method]["security"];
            let is_open = *own == serde_json::json!([{}]);
            assert!(is_open || own.is_null(), "{path}: {own}");
            assert_eq!(is_open, tag == "probe", "{path}");
            assert_eq!(is_open, !path.starts_with("/v1/"), "{path}");
        }
    }

    #[test]
    fn a_node_is_not_ready_any_more_once_no_order_may_leave() {
        let given = [
            ("LOCKSTEP_NODE_NAME", "node-1"),
            ("LOCKSTEP_DATABASE_URL", "postgres://u@db/x"),
            ("LOCKSTEP_NATS_URLS", "nats://n1"),
        ];
        let vars: std::collections::BTreeMap<String, String> =
            given.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let config = NodeConfig::from_vars(&vars).unwrap();
        // A lease of 60 s, without the fence of 15 s and the 2 s that an order needs.
        assert_eq!(ready_for(&config), Duration::from_secs(43));
    }

    #[test]
    fn every_route_is_counted_under_its_own_name() {
        let described: BTreeSet<String> = operations().into_iter().map(|(path, ..)| path).collect();
        let counted: BTreeSet<String> = metrics::ROUTES.iter().map(|r| (*r).to_owned()).collect();
        let more: Vec<&String> = counted.difference(&described).collect();
        assert_eq!(more, ["none"]);
        assert!(described.is_subset(&counted), "{described:?}");
    }

    #[test]
    fn the_description_is_the_one_that_the_handlers_make() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.json");
        let made = described().to_pretty_json().unwrap() + "\n";
        if std::env::var_os("LOCKSTEP_BLESS").is_some() {
            std::fs::write(&path, &made).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == made,
            "{} is not up to date: LOCKSTEP_BLESS=1 cargo test -p lockstep --lib api",
            path.display()
        );
    }
}
