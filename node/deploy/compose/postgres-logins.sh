#!/usr/bin/env bash
# Runs once, when Postgres makes its data folder: a login for the nodes, which may do what nodes need.
# `lockstep roles apply` gives the roles their rights afterwards.
set -euo pipefail

psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
  --set password="$(cat /run/secrets/database-node)" <<'END'
create role lockstep_node nologin;
create role lockstep_api nologin;
-- The second role for the API that each node serves.
create role fleet login password :'password' in role lockstep_node, lockstep_api;
END
