#!/usr/bin/env python3
"""Makes dashboards/*.json and the panel tables of README.md from the list of panels below.

A panel is one entry: what it shows, what to do, its queries, its unit, where good ends. Everything that
Grafana wants besides is the same for all panels and is said once. Edit here, then run this; with --check it
only says whether the files are what this would write.

In a query NODE stands for the chosen nodes, RATE for the shortest range with two samples, and RANGE for the
time that the page shows.
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24

# Where a number turns from good to bad: (from, colour).
ANY_IS_BAD = [(None, "green"), (1, "red")]
ANY_IS_WORTH_A_LOOK = [(None, "green"), (1, "orange")]


def below(orange, red):
    """Good while it is small."""
    return [(None, "green"), (orange, "orange"), (red, "red")]


def above(red, orange):
    """Good while it is large."""
    return [(None, "red"), (red, "orange"), (orange, "green")]


def sums(metric, by, legend, rate="rate"):
    """One query: a counter's rate, or its increase, by a label."""
    return (f"sum by ({by}) ({rate}({metric}{{NODE}}[RATE]))", legend)


def happened(metric, by, legend):
    """For what should be rare: how often, in the minute before."""
    return sums(metric, by, legend, "increase")


def total(metric, legend, rate="rate"):
    return (f"sum({rate}({metric}{{NODE}}[RATE]))", legend)


def quantiles(metric, *which, by="", legend=""):
    """Quantiles of a histogram, one query each."""
    group = f"le, {by}" if by else "le"
    name = {0.5: "p50", 0.95: "p95", 0.99: "p99"}
    return [
        (f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket{{NODE}}[RATE])))", f"{legend}{name[q]}")
        for q in which
    ]


def panel(title, means, do, queries, unit="short", steps=None, alerts=(), kind="timeseries", **look):
    return {
        "title": title,
        "means": means,
        "do": do,
        "queries": [queries] if isinstance(queries, tuple) else queries,
        "unit": unit,
        "steps": steps or [(None, "green")],
        "alerts": [alerts] if isinstance(alerts, str) else alerts,
        "kind": kind,
        "look": look,
    }


def number(title, means, do, query, unit="short", steps=None, alerts=(), **look):
    """One number to take in at a glance."""
    return panel(title, means, do, (query, title.lower()), unit, steps, alerts, "stat", **{"width": 4, "height": 5, **look})


def moments(*args, **look):
    """What should be rare, as bars."""
    return panel(*args, **{"bars": True, **look})


OWN_TIME = "lockstep_copy_own_time_seconds"
OWN_TIME_STEPS = below(0.01, 0.05)

OVERVIEW = {
    "file": "overview",
    "title": "Lockstep: overview",
    "about": "Is all well? Every number of the first rows is green when it is; the other dashboards say why it is not.",
    "rows": [
        ("Is all well?", [
            number(
                "Nodes that answer",
                "Nodes whose metrics Prometheus can read. The scrape job is named lockstep.",
                "Fewer than you started: look at that node's log and machine. Its accounts go to the others after one lease.",
                'sum(up{job="lockstep"})', steps=above(1, 2), alerts="LockstepNodeDown"),
            number(
                "Accounts nobody owns",
                "Enabled accounts without an owner, as the node that sees most of them counts them (up to 1000).",
                "Above 0 for longer than a lease: start another node, or raise `LOCKSTEP_CAPACITY`.",
                "max(lockstep_lease_unowned_accounts{NODE})", steps=ANY_IS_BAD, alerts="LockstepAccountUnowned"),
            number(
                "Accounts without a session",
                "Owned accounts whose session at the broker is not open. Masters of other publishers have none and need none.",
                "Above 0 for longer than a takeover takes: `lockstep status` names the accounts, and why.",
                "sum(lockstep_lease_owned_accounts{NODE}) - sum(lockstep_broker_sessions_open{NODE})",
                steps=ANY_IS_BAD, alerts="LockstepBrokerSessionDown"),
            number(
                "Leases confirmed",
                "Time since the node that waits longest had its leases confirmed. A cycle is 20 s; from 45 s on the node sends nothing.",
                "Above 25 s: the database does not answer that node; see the dashboard of lease and takeover.",
                "time() - min(lockstep_lease_confirmed_timestamp_seconds{NODE})", "s",
                below(25, 45), "LockstepNodeDegraded"),
            number(
                "Last word of a master",
                "Time since the master that is silent longest was heard. A beacon comes every 2 s.",
                "Above 12 s: a publisher, or the way to it, is gone; `lockstep status` names the master. Its followers stay as they are.",
                "time() - min(lockstep_bus_feed_beacon_oldest_timestamp_seconds{NODE})", "s",
                below(6, 12), "LockstepFeedStale"),
            number(
                "Rows that wait",
                "Rows that the writers have not written yet. Orders do not wait for them.",
                "Rising: the database is away or slow; bring it back within the hour.",
                "sum(lockstep_writer_backlog_rows{NODE})", steps=below(1000, 10000), alerts="LockstepWriterBacklog"),
            number(
                "Degraded minutes",
                "Minutes, of all nodes, in which a lease, the bus, the database or a broker was missing; in the time that this page shows.",
                "`lockstep status` says when, and what was missing.",
                'sum(increase(lockstep_uptime_recorded_total{NODE, state="degraded"}[RANGE]))',
                steps=below(1, 10), decimals=0),
            number(
                "Second copies",
                "Second copies of one trade that were found and closed, in the time that this page shows.",
                "Above 0: find the trade in the log, ask `lockstep why LINK TICKET`, and look for the takeover or the frozen node before it.",
                "sum(increase(lockstep_duplicates_found_total{NODE}[RANGE]))",
                steps=ANY_IS_BAD, alerts="LockstepDuplicateFound", decimals=0),
            number(
                "Copies refused",
                "Orders that a broker refused, or whose end is not known, in the time that this page shows.",
                "`lockstep status` counts them by the broker's reason; `lockstep why LINK TICKET` tells of one.",
                'sum(increase(lockstep_copy_actions_total{NODE, outcome=~"rejected|unknown"}[RANGE]))',
                steps=below(1, 10), decimals=0),
            number(
                "Two publishers",
                "Times that two publishers spoke for one master in turns, in the time that this page shows.",
                "Above 0: two programs publish one account; the log names the master. End one.",
                "sum(increase(lockstep_bus_two_publishers_total{NODE}[RANGE]))",
                steps=ANY_IS_BAD, alerts="LockstepEpochFlapping", decimals=0),
            number(
                "Takeovers of the dead",
                "Accounts that were taken over from an owner that was lost, in the time that this page shows.",
                "Above 0: a node died, froze or lost the database; its log says which.",
                'sum(increase(lockstep_tenures_begun_total{NODE, kind!="free"}[RANGE]))',
                steps=ANY_IS_WORTH_A_LOOK, decimals=0),
            number(
                "Doubtful feeds",
                "Masters whose state is not known for sure, node by node: their followers only close. Short at every start.",
                "Above 0 for longer than 30 s: that master's publisher does not answer; see the dashboard of the bus.",
                "sum(lockstep_bus_feeds_doubtful{NODE})", steps=ANY_IS_WORTH_A_LOOK),
        ]),
        ("Copying", [
            panel(
                "Own time",
                "From the master's callback to the instruction before the follower's order call, by platform; the broker's answer is not in it.",
                "High: the dashboard of own time says where it goes.",
                quantiles(OWN_TIME, 0.5, 0.95, 0.99, by="platform", legend="{{platform}} "), "s", OWN_TIME_STEPS, width=8),
            panel(
                "Copies by outcome",
                "What was done for followers, a second, by how it ended. rejected: the broker said no; unknown: nobody knows yet, the tag is looked for.",
                "rejected: `lockstep status` has the broker's reasons. unknown for longer than a minute: look at that account at the broker.",
                sums("lockstep_copy_actions_total", "outcome", "{{outcome}}"), "ops", width=8),
            moments(
                "Skips by reason",
                "Trades that were decided not to be copied, in the minute before. Each is also a row with account and ticket.",
                "Each is a decision of your link's settings (volume, price, symbol): compare them with what the master trades. `lockstep why LINK TICKET` tells of one.",
                happened("lockstep_copy_skips_total", "reason", "{{reason}}"),
                steps=ANY_IS_WORTH_A_LOOK, alerts="LockstepSevereSkips", width=8),
            moments(
                "Takeovers",
                "Tenures that began, in the minute before. free: nobody had the account; expired: its owner's lease ran out; proven_dead: its owner is known to have ended.",
                "expired without a node that ended: nodes freeze or lose the database; see their logs.",
                happened("lockstep_tenures_begun_total", "kind", "{{kind}}"), width=8),
            moments(
                "Gate drops",
                "Orders and events that were not sent because the gate was closed, in the minute before. A drop is the protection at work, not a loss: the new owner sends.",
                "Normal at a takeover. Without one the node's lease is late or its machine stalls (revoked, frozen).",
                happened("lockstep_gate_dropped_total", "reason", "{{reason}}"), steps=ANY_IS_WORTH_A_LOOK, width=8),
            panel(
                "Owned accounts",
                "Accounts that each node owns, after its last lease cycle.",
                "One node with everything after an incident is fine: nodes that have far more than their share give accounts away, one in 20 seconds.",
                ("sum by (instance) (lockstep_lease_owned_accounts{NODE})", "{{instance}}"), stacked=True, width=8),
        ]),
        ("API", [
            panel(
                "API requests",
                "Requests to the API that were answered, a second, by the class of their status. Nodes without an API have none.",
                "5xx: what the API needs is not there; the answers say what, and so does the log. Which routes: `lockstep_api_requests_total` by route.",
                sums("lockstep_api_requests_total", "class", "{{class}}"), "ops", width=8),
            panel(
                "API time",
                "From the head of a request to the API to the head of its answer. A close waits for its broker in that, up to 10 s.",
                "Rising: the database is slow for questions, or clients ask for much at once. Copying does not wait for any of it.",
                quantiles("lockstep_api_request_seconds", 0.5, 0.95), "s", below(1, 5), width=8),
            moments(
                "API rejections",
                "Requests that were turned away, in the minute before. auth: no good token; scope: one that may not do it; body_too_large; timeout: not done in 15 s; overload: too much under way.",
                "auth again and again: a token has expired, or somebody guesses. overload: a client asks too much at once; the log names nobody, the proxy before the API does.",
                happened("lockstep_api_rejected_total", "reason", "{{reason}}"), steps=ANY_IS_WORTH_A_LOOK, width=8),
        ]),
    ],
}

OWN = {
    "file": "own-time",
    "title": "Lockstep: own time",
    "about": "Where the time between a master's trade and the order for its follower goes.",
    "rows": [
        ("How long", [
            *[
                panel(
                    f"Own time {name} by action",
                    "From the master's callback to the instruction before the follower's order call. Only orders that waited for no other answer of the broker are counted.",
                    do, quantiles(OWN_TIME, q, by="platform, action", legend="{{platform}} {{action}} "), "s", OWN_TIME_STEPS)
                for q, name, do in [
                    (0.5, "p50", "The usual case. Rising with load: give the node fewer accounts, or the machine more cores."),
                    (0.95, "p95", "Bursts show here first: fewer accounts a node, or more cores."),
                    (0.99, "p99", "As p95; single high values also come from a machine that stalls."),
                ]
            ],
            panel(
                "Bursts",
                "How many orders left with which own time, in the minute before. A burst is a column; one that reaches up was too large for the node.",
                "Columns that reach above 50 ms: spread the followers of that master over more nodes.",
                (f"sum by (le) (increase({OWN_TIME}_bucket{{NODE}}[RATE]))", "{{le}}"), "s", OWN_TIME_STEPS,
                kind="heatmap", width=16),
            panel(
                "Orders within 10 ms",
                "Share of the orders whose own time was at most 10 ms.",
                "Sinking: Stages says whether the publisher, the node or the broker's threads are late.",
                (f'sum by (instance) (rate({OWN_TIME}_bucket{{NODE, le="0.01"}}[RATE])) / sum by (instance) (rate({OWN_TIME}_count{{NODE}}[RATE]))', "{{instance}}"),
                "percentunit", above(0.9, 0.99), max=1),
        ]),
        ("Stages", [
            panel(
                "Stages p50",
                "publish: from a master's event to handing it to the bus, on the node that leads it. turn: from its arrival at a node to its follower's turn. thread: from a session to a thread, where broker calls hold one.",
                "The largest is where the time goes. The way over the bus lies between the first two, and is not in here.",
                [
                    *quantiles("lockstep_bus_publish_wait_seconds", 0.5, legend="publish "),
                    *quantiles("lockstep_copy_turn_wait_seconds", 0.5, legend="turn "),
                    *quantiles("lockstep_broker_thread_wait_seconds", 0.5, legend="thread "),
                ], "s", below(0.005, 0.05)),
            panel(
                "Stages p99",
                "As Stages p50, of the slowest in a hundred.",
                "publish: the node that leads the master is overloaded. turn: this node has too many followers of one master. thread: raise `LOCKSTEP_BLOCKING_THREADS_MAX`.",
                [
                    *quantiles("lockstep_bus_publish_wait_seconds", 0.99, legend="publish "),
                    *quantiles("lockstep_copy_turn_wait_seconds", 0.99, legend="turn "),
                    *quantiles("lockstep_broker_thread_wait_seconds", 0.99, legend="thread "),
                ], "s", below(0.005, 0.05)),
            panel(
                "Events without the bus",
                "Events of masters that the follower's own node leads, a second. They reach it in process, and by the bus a second time.",
                "Nothing. Where these are many, own time is shorter than the bus allows.",
                sums("lockstep_bus_events_local_total", "instance", "{{instance}}"), "ops"),
        ]),
        ("Broker calls and their threads", [
            panel(
                "Broker calls",
                "Orders handed to brokers, a second, by action, and answers, by outcome.",
                "Started without finished: the broker does not answer. Many that are not done: `lockstep status` has the reasons.",
                [
                    sums("lockstep_broker_calls_started_total", "action", "started, {{action}}"),
                    sums("lockstep_broker_calls_finished_total", "outcome", "finished, {{outcome}}"),
                ], "ops"),
            panel(
                "Broker calls without an answer yet",
                "Calls started less calls finished. A node that is gone keeps its share until Prometheus forgets it, five minutes at most.",
                "Staying above 0 in quiet times: a session hangs; it is given up after `LOCKSTEP_BROKER_CALL_LIMIT`.",
                ("sum by (instance) (lockstep_broker_calls_started_total{NODE}) - sum by (instance) (lockstep_broker_calls_finished_total{NODE})", "{{instance}}"),
                steps=[(None, "green"), (100, "orange")]),
            panel(
                "Threads for broker calls",
                "Threads for calls that hold one: all of them are made at the start. 0 where no account has such calls.",
                "A step without a start would be a fault: report it. Too few for the accounts: the log warns of it at the start.",
                ("sum by (instance) (lockstep_broker_threads_started_total{NODE})", "{{instance}}")),
        ]),
    ],
}

LEASE = {
    "file": "lease",
    "title": "Lockstep: lease and takeover",
    "about": "Who may send, how safely, and what happened when an account changed hands.",
    "rows": [
        ("The lease", [
            panel(
                "Lease margin",
                "Time that was left until the node's own deadline on the oldest held lease when a cycle confirmed it. Near lease minus fence minus cycle (25 s) when all is well; at 0 the node has just stopped sending. The other line is lease minus fence (45 s), the most that it can be.",
                "Sinking: cycles are slow or fail; see the two panels beside, then the database.",
                [
                    ("min by (instance) (lockstep_lease_margin_seconds{NODE})", "{{instance}}"),
                    ("min(lockstep_lease_trust_seconds{NODE})", "lease minus fence"),
                ], "s", above(9, 20), "LockstepLeaseMarginLow"),
            panel(
                "Age of the last confirmed cycle",
                "Time since the database last confirmed a node's leases. A saw tooth up to the cycle (20 s). Above lease minus fence (45 s) the node sends nothing.",
                "Above 25 s: the database does not answer this node. Above 45 s it has stopped sending, as it should; bring the database back.",
                ("time() - max by (instance) (lockstep_lease_confirmed_timestamp_seconds{NODE})", "{{instance}}"), "s", below(25, 45), "LockstepNodeDegraded"),
            panel(
                "Length of a lease cycle",
                "From the clock reading before a cycle to its commit. This time is taken off every lease.",
                "Rising: the database is slow or far away. Look for locks on `trading_accounts`, a full disk, missing vacuum.",
                quantiles("lockstep_lease_cycle_duration_seconds", 0.5, 0.99), "s", below(0.5, 2)),
            panel(
                "Lease cycles by outcome",
                "Lease cycles a second, by how they ended; all but confirmed are failures.",
                "Other than confirmed: the word names the cause (timeout, unreachable, failed, pooler ...); mend the database or the way to it.",
                sums("lockstep_lease_cycles_total", "outcome", "{{outcome}}"), "ops"),
            panel(
                "Claims frozen",
                "1 while a node takes no expired accounts because the database's time is in doubt.",
                "It ends by itself after 75 s. Until then accounts of a node that died wait.",
                ("max by (instance) (lockstep_lease_claims_frozen{NODE})", "{{instance}}"), "bool_yes_no", ANY_IS_BAD, "LockstepClockStepped"),
            moments(
                "Database steps",
                "How often the database's time came in doubt, in the minute before. clock: its clock stepped; timeline: another server answered, after a failover; own_clock: the node's machine was held by its hypervisor, or its clock was set together with the database's.",
                "Check the time service of the database's machine, unless it was a planned failover.",
                happened("lockstep_lease_database_steps_total", "kind", "{{kind}}"), steps=ANY_IS_BAD, alerts="LockstepClockStepped"),
        ]),
        ("Who owns what", [
            panel(
                "Nodes that take accounts",
                "Nodes that are alive by the database's word, as each node counts them. Nodes that end take none any more.",
                "Fewer than you started: the missing one does not reach the database.",
                ("max by (instance) (lockstep_lease_nodes{NODE})", "{{instance}}")),
            panel(
                "Longest without an owner",
                "How long the account that waits longest has had no owner; about 0 where all have one.",
                "Above 90 s: no node has room, claims are frozen, or the account has ended its owners several times; `lockstep status` names it.",
                ("time() - min(lockstep_lease_unowned_oldest_timestamp_seconds{NODE})", "longest"), "s", below(60, 90), "LockstepAccountUnowned"),
            panel(
                "Sessions open by node",
                "Sessions that are open and synced at their brokers. Masters of other publishers have none.",
                "Below the owned accounts: `lockstep status` names the accounts, and why their sessions are not open.",
                ("sum by (instance) (lockstep_broker_sessions_open{NODE})", "{{instance}}"), stacked=True),
            moments(
                "Claims and releases",
                "Accounts claimed, in the minute before (expired: the old owner's lease ran out), and released after they were drained.",
                "A steady stream: accounts move to and fro; look for sessions that do not open.",
                [
                    happened("lockstep_lease_claims_total", "kind", "claimed, {{kind}}"),
                    total("lockstep_lease_releases_total", "released", "increase"),
                ]),
            moments(
                "Losses",
                "Accounts that were lost without having been released, and accounts left to run out because they could not be kept or drained here, in the minute before.",
                "Losses without a node that froze or lost the database: somebody changed rows by hand, or two nodes see different databases.",
                [
                    total("lockstep_lease_losses_total", "lost", "increase"),
                    total("lockstep_lease_abandoned_total", "left to run out", "increase"),
                ], steps=ANY_IS_WORTH_A_LOOK),
            moments(
                "Locked rows",
                "Rows that a renewal skipped because somebody else held a lock on them, in the minute before.",
                "Again and again: somebody holds account rows in an open transaction; find it in `pg_stat_activity`, and end it before the lease does.",
                happened("lockstep_lease_rows_locked_total", "instance", "{{instance}}"), steps=ANY_IS_WORTH_A_LOOK),
        ]),
        ("Takeovers", [
            moments(
                "Tenures ended",
                "In the minute before. drained: given back with nothing under way; not_drained: orders were under way, the lease has to run out; unserved: another node shall try; stopped: the lease was lost.",
                "not_drained and unserved: the session's broker did not answer; see the log of the node.",
                happened("lockstep_tenures_ended_total", "how", "{{how}}")),
            moments(
                "Settle and audits",
                "Plans after a takeover, in the minute before. settled: the wait before the first open is over; audit: the looks for second copies after 5, 30 and 120 s; lease_restored: after a time without a lease; session: the first plan of a session.",
                "Each takeover after a crash has its settled and three audits. lease_restored without an outage: cycles fail now and then.",
                ('sum by (reason) (increase(lockstep_reconciles_total{NODE, reason=~"settled|audit|lease_restored|session"}[RATE]))', "{{reason}}")),
            moments(
                "Revocations",
                "Times that a node took all its permissions back at once, in the minute before. freeze: its process stood still for more than 2 s.",
                "freeze: the machine stalls (memory, hypervisor, a debugger). timeline: another server is the primary now. Permissions are back with the next cycle.",
                happened("lockstep_gate_revocations_total", "reason", "{{reason}}"), steps=ANY_IS_WORTH_A_LOOK),
            moments(
                "Sessions that did not open",
                "Times that a session at a broker could not be opened, in the minute before; each is tried again.",
                "`lockstep status` names the accounts and the reason: password, address, broker closed.",
                happened("lockstep_broker_session_open_failures_total", "instance", "{{instance}}"),
                steps=ANY_IS_BAD, alerts="LockstepBrokerSessionDown"),
            moments(
                "What was missing",
                "Degraded minutes that ended in the minute before, by what was missing; one may have several reasons.",
                "no account lease, database: Postgres or the way to it. bus: NATS. broker: an account without a session. `lockstep status` has the record of 24 hours.",
                happened("lockstep_uptime_degraded_total", "reason", "{{reason}}"), steps=ANY_IS_BAD, alerts="LockstepNodeDegraded"),
        ]),
    ],
}

BUS = {
    "file": "bus",
    "title": "Lockstep: bus and reconcile",
    "about": "What feeds heard, what they missed, and what was repaired.",
    "rows": [
        ("Feeds", [
            panel(
                "Age of the oldest beacon",
                "Time since the feed that waits longest heard from its master, node by node. 0 on a node without feeds.",
                "Above 12 s on one node: its way to NATS. On all: the publisher is gone. Its followers stay as they are until it is back.",
                ("time() - min by (instance) (lockstep_bus_feed_beacon_oldest_timestamp_seconds{NODE})", "{{instance}}"), "s", below(6, 12), "LockstepFeedStale"),
            moments(
                "Gaps by kind",
                "Losses that feeds found, in the minute before, by how they showed. Each is repaired by a snapshot.",
                "A few at restarts are normal. A steady rise: the bus loses messages, or a publisher is overloaded.",
                happened("lockstep_bus_gaps_total", "kind", "{{kind}}"), steps=ANY_IS_WORTH_A_LOOK),
            moments(
                "Doubts by reason",
                "Times that a feed became doubtful, in the minute before, by its first reason. joining is every feed's first.",
                "silent: a master's publisher is gone. slow_consumer: this node is overloaded. digest_differs: report it.",
                happened("lockstep_bus_doubts_total", "reason", "{{reason}}")),
            panel(
                "Feeds",
                "Feeds that are open, by node: one for each master that the node's followers copy.",
                "0 on a node that owns followers: their links are switched off, or have no master.",
                ("sum by (instance) (lockstep_bus_feeds{NODE})", "{{instance}}")),
            panel(
                "Length of doubts",
                "How long feeds stayed doubtful: followers of a doubtful feed copy nothing new.",
                "Above some seconds: the publisher answers slowly, or not at first.",
                quantiles("lockstep_bus_doubt_seconds", 0.5, 0.99), "s", below(6, 30)),
            panel(
                "Clock offset",
                "How far the furthest publisher's clock is from this node's, the shortest way included; negative where that clock is ahead. Own time between two machines is wrong by so much.",
                "Above some ms: mend the time service of that machine. Nothing is decided by it.",
                ("max by (instance) (lockstep_bus_clock_offset_seconds{NODE})", "{{instance}}"), "s", below(0.05, 1), signed=True),
        ]),
        ("Messages", [
            panel(
                "Events",
                "Trade events that feeds received, and that the publishers of leased masters handed to the bus, a second.",
                "May be 0 for hours. Published without received: no node has a follower of that master.",
                [
                    total("lockstep_bus_events_received_total", "received"),
                    total("lockstep_bus_events_published_total", "published"),
                ], "ops"),
            panel(
                "Beacons",
                "Beacons that feeds received, and that the publishers of leased masters handed to the bus, a second: one in 2 s from each master.",
                "They stop: publishers or the bus are gone.",
                [
                    total("lockstep_bus_beacons_received_total", "received"),
                    total("lockstep_bus_beacons_published_total", "published"),
                ], "ops"),
            moments(
                "Connection",
                "What the client said of its connection to NATS, in the minute before. Nothing is decided by it.",
                "Many disconnects: the network or the NATS server. server_error: the server refused something; the log names it.",
                happened("lockstep_bus_connection_events_total", "event", "{{event}}")),
            moments(
                "Messages dropped",
                "Messages that were not used or not sent, in the minute before. came_locally is no fault: the second arrival of an event that came without the bus.",
                "undecodable: a publisher speaks another version. follower_queue_full: this node is overloaded. old_epoch: leftovers of a publisher that was replaced.",
                happened("lockstep_bus_messages_dropped_total", "reason", "{{reason}}")),
            moments(
                "Epochs",
                "New epochs of publishers that were running, by reason, and publishers that stopped because a higher epoch was heard, in the minute before.",
                "disconnected: NATS was away. permit_lost: the master's lease was late. superseded: somebody else publishes for that master.",
                [
                    happened("lockstep_bus_epochs_raised_total", "reason", "{{reason}}"),
                    total("lockstep_bus_publishers_superseded_total", "superseded", "increase"),
                ], steps=ANY_IS_WORTH_A_LOOK, alerts="LockstepEpochFlapping"),
        ]),
        ("Snapshots", [
            panel(
                "Snapshot requests",
                "Requests for a master's state, started, and finished by outcome, a second.",
                "no_responders: the publisher is not there. timed_out: it is there and slow.",
                [
                    total("lockstep_bus_snapshots_started_total", "started"),
                    sums("lockstep_bus_snapshots_finished_total", "outcome", "finished, {{outcome}}"),
                ], "ops"),
            panel(
                "Snapshots wanted and answered",
                "Fresh snapshots that followers asked for, by reason, replies of this fleet's publishers, and rounds of quick tries that settled nothing, a second.",
                "Tries exhausted: that master's publisher has not answered for long; start it, or look at its log.",
                [
                    sums("lockstep_bus_snapshots_wanted_total", "reason", "wanted, {{reason}}"),
                    total("lockstep_bus_snapshots_answered_total", "answered"),
                    total("lockstep_bus_snapshot_tries_exhausted_total", "tries exhausted"),
                ], "ops"),
            panel(
                "Time of a snapshot",
                "From a snapshot request to the complete answer.",
                "Rising: large books or a slow publisher.",
                quantiles("lockstep_bus_snapshot_seconds", 0.5, 0.99), "s", below(0.5, 2.5)),
        ]),
        ("Reconcile", [
            panel(
                "Plans by reason",
                "Plans made from complete reads, a second, by why.",
                "feed: doubt on the bus. not_sent, unresolved: the broker or the lease. A steady stream of one reason: look for its cause.",
                sums("lockstep_reconciles_total", "reason", "{{reason}}"), "ops"),
            panel(
                "Steps of plans",
                "What plans decided, a second: what events did not do, and was repaired.",
                "A steady stream while masters are quiet: something outside changes the accounts.",
                sums("lockstep_reconcile_actions_total", "action", "{{action}}"), "ops"),
            panel(
                "Copies by action",
                "What was done for followers, a second, by the step.",
                "close_orphan, close_duplicate, rebind_copy: repairs; `lockstep why LINK TICKET` tells the story of one.",
                sums("lockstep_copy_actions_total", "action", "{{action}}"), "ops"),
            moments(
                "Held and restless plans",
                "Plans held for a second, fresh read, and links whose plans did not come to rest within six rounds, in the minute before.",
                "Restless: one account's book does not stay as planned; find it in the log by that word and look at the account.",
                [
                    total("lockstep_reconcile_held_total", "held", "increase"),
                    total("lockstep_reconcile_restless_total", "restless", "increase"),
                ], steps=[(None, "green"), (1, "orange"), (5, "red")], alerts="LockstepPlanHeld"),
            panel(
                "Links without tags",
                "Links whose broker does not keep our tags: nothing is opened late on them.",
                "`lockstep status` names them. If the broker can keep comments, have it do so and switch the link on again (`lockstep link enable N`).",
                ("sum by (instance) (lockstep_links_untaggable{NODE})", "{{instance}}"), steps=ANY_IS_WORTH_A_LOOK),
            panel(
                "Links that are held",
                "Links that are switched on and paused, or only close, because somebody said so: of the link, an account or the whole fleet.",
                "`lockstep status` says of what it was said; `lockstep resume --all` ends the kill switch, `lockstep resume` with a link or an account the rest.",
                [
                    ("sum(lockstep_links_paused{NODE})", "paused"),
                    ("sum(lockstep_links_close_only{NODE})", "close only"),
                ], steps=ANY_IS_WORTH_A_LOOK, alerts="LockstepCopyingPaused"),
        ]),
    ],
}

WRITER = {
    "file": "writer",
    "title": "Lockstep: writer and database",
    "about": "Whether what was done is written down, and how fast the database takes it.",
    "rows": [
        ("Rows", [
            panel(
                "Writer backlog",
                "Rows that wait to be written, after the last round. It grows while the database is away; orders go on meanwhile.",
                "Rising: the database is away or slow. Bring it back within the hour, and do not restart the node meanwhile.",
                ("sum by (instance, kind) (lockstep_writer_backlog_rows{NODE})", "{{instance}} {{kind}}"), steps=below(1000, 10000), alerts="LockstepWriterBacklog"),
            panel(
                "Rows by outcome",
                "Rows that left the writer, a second. coalesced: a newer row made it needless. not_owner is a stale owner's row, refused as it should be. refused and full are lost rows.",
                "busy for long: somebody holds a lock on account rows.",
                sums("lockstep_writer_rows_total", "outcome", "{{outcome}}"), "ops"),
            moments(
                "Rows lost",
                "Rows that the database refused one by one, or for which there was no room, in the minute before, by kind.",
                "refused: the log has the row and the reason; report it. full: the backlog was at its bound. Copies themselves are not affected.",
                ('sum by (kind, outcome) (increase(lockstep_writer_rows_total{NODE, outcome=~"refused|full"}[RATE]))', "{{kind}}, {{outcome}}"),
                steps=ANY_IS_BAD, alerts="LockstepRowsRefused"),
            panel(
                "Wait of a row",
                "From the oldest change that a row stands for to the database's answer: what lists and `lockstep status` lag behind.",
                "Rising: as Writer backlog.",
                quantiles("lockstep_writer_row_wait_seconds", 0.5, 0.99, by="kind", legend="{{kind}} "), "s", below(1, 10)),
        ]),
        ("Database", [
            panel(
                "Statements",
                "Statements that the writer sent, a second, by kind, and how they ended, by what it did next.",
                "Ends other than done: the log names the database's error.",
                [
                    sums("lockstep_writer_statements_started_total", "kind", "started, {{kind}}"),
                    sums("lockstep_writer_statements_finished_total", "outcome", "finished, {{outcome}}"),
                ], "ops"),
            panel(
                "Length of a statement",
                "Length of the writer's statements, connecting included.",
                "Rising: the database is slow; look for locks and missing vacuum.",
                quantiles("lockstep_writer_statement_seconds", 0.5, 0.99), "s", below(0.5, 5)),
            number(
                "Schema does not fit",
                "1 while the database refuses every row of a node for a missing table, column or right.",
                "Start one node of this version against the database (it migrates it), or grant the missing right; the rows are kept meanwhile.",
                "max(lockstep_writer_deployment_fault{NODE})", "bool_yes_no", ANY_IS_BAD, "LockstepSchemaDoesNotFit", width=4, height=8),
            number(
                "Minutes that were recorded",
                "Minutes that nodes saw from end to end, or in which something was missing, in the time that this page shows.",
                "Fewer than nodes times minutes: a node did not run, or stood still. `lockstep status` counts the missing ones.",
                "sum(increase(lockstep_uptime_recorded_total{NODE}[RANGE]))", width=4, height=8, decimals=0),
        ]),
    ],
}

DASHBOARDS = [OVERVIEW, OWN, LEASE, BUS, WRITER]


def query_text(text):
    text = text.replace("NODE", 'instance=~"$node"')
    return text.replace("[RATE]", "[$__rate_interval]").replace("[RANGE]", "[$__range]")


def target(index, query, kind):
    text, legend = query
    made = {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": query_text(text),
        "legendFormat": legend,
        "editorMode": "code",
    }
    # One number over the whole page is asked for once, at its end.
    made.update({"instant": True, "range": False} if "[RANGE]" in text else {"range": True})
    if kind == "heatmap":
        made["format"] = "heatmap"
    return made


def graph(spec):
    look = spec["look"]
    has_limits = len(spec["steps"]) > 1
    return {
        "drawStyle": "bars" if look.get("bars") else "line",
        "lineWidth": 1,
        "fillOpacity": 60 if look.get("bars") else 20 if look.get("stacked") else 5,
        "showPoints": "never" if look.get("bars") else "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if look.get("bars") or look.get("stacked") else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if has_limits and not look.get("bars") else "off"},
    }


OPTIONS = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background",
        "graphMode": "none",
        "textMode": "value",
        "justifyMode": "auto",
        "orientation": "auto",
    },
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64, "reverse": False},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "tooltip": {"show": True, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": "s", "reverse": False},
    },
}


def made_panel(identity, place, spec):
    kind, look = spec["kind"], spec["look"]
    defaults = {
        "unit": spec["unit"],
        "thresholds": {"mode": "absolute", "steps": [{"color": c, "value": v} for v, c in spec["steps"]]},
        "color": {"mode": "thresholds" if kind == "stat" else "palette-classic"},
    }
    if not look.get("signed"):
        defaults["min"] = 0
    for field in ("max", "decimals"):
        if field in look:
            defaults[field] = look[field]
    if look.get("bars"):
        defaults["decimals"] = 0
    if kind == "timeseries":
        defaults["custom"] = graph(spec)
    made = {
        "id": identity,
        "type": kind,
        "title": spec["title"],
        "description": f"{spec['means']} {spec['do']}",
        "datasource": SOURCE,
        "interval": "15s",
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [target(index, query, kind) for index, query in enumerate(spec["queries"])],
        "options": OPTIONS[kind],
    }
    if spec["alerts"]:
        made["links"] = [
            {"title": f"Runbook: {alert}", "url": "${runbook}#" + alert.lower(), "targetBlank": True}
            for alert in spec["alerts"]
        ]
    return made


def made_panels(rows):
    """Rows one under the other; panels from left to right, the next line when one is full."""
    made, y = [], 0
    for title, specs in rows:
        made.append({
            "id": len(made) + 1, "type": "row", "title": title, "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y}, "panels": [],
        })
        x, y, line = 0, y + 1, 0
        for spec in specs:
            width, height = spec["look"].get("width", 8), spec["look"].get("height", 8)
            if x + width > COLUMNS:
                x, y, line = 0, y + line, 0
            made.append(made_panel(len(made) + 1, {"h": height, "w": width, "x": x, "y": y}, spec))
            x, line = x + width, max(line, height)
        y += line
    return made


def variables():
    nodes = 'label_values(up{job="lockstep"}, instance)'
    return [
        {
            "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {},
            "hide": 0, "includeAll": False, "multi": False, "options": [], "refresh": 1, "regex": "",
        },
        {
            "name": "node", "label": "Node", "type": "query", "datasource": SOURCE,
            "query": {"query": nodes, "refId": "node"}, "current": {}, "hide": 0, "includeAll": True,
            "allValue": ".*", "multi": True, "options": [], "refresh": 2, "regex": "", "sort": 1,
        },
        {"name": "runbook", "label": "Runbook", "type": "constant", "query": "RUNBOOK.md", "hide": 2, "skipUrlSync": True},
    ]


def made_dashboard(spec):
    return {
        "uid": f"lockstep-{spec['file']}",
        "title": spec["title"],
        "description": spec["about"],
        "tags": ["lockstep"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "links": [{
            "title": "Lockstep", "type": "dashboards", "tags": ["lockstep"], "asDropdown": False, "icon": "dashboard",
            "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "", "url": "",
        }],
        "templating": {"list": variables()},
        "panels": made_panels(spec["rows"]),
    }


def tables():
    """For README.md: of each panel its metrics, what it means and what to do."""
    lines = []
    for spec in DASHBOARDS:
        lines += [f"### {spec['title'].removeprefix('Lockstep: ').capitalize()}", "", f"`dashboards/{spec['file']}.json`. {spec['about']}", ""]
        lines += ["| panel | metric | what it means | what to do |", "|---|---|---|---|"]
        for _, specs in spec["rows"]:
            for one in specs:
                text = " ".join(query for query, _ in one["queries"])
                names = dict.fromkeys(re.findall(r"\b(?:lockstep_\w+|up)\b(?=\{)", text))
                metrics = ", ".join(f"`{name}`" for name in names)
                lines.append(f"| {one['title']} | {metrics} | {one['means']} | {one['do']} |")
        lines.append("")
    return "\n".join(lines)


BEGIN = "<!-- From here to the end of the tables .make.py writes. -->\n"
END = "<!-- The end of the tables. -->\n"


def readme(before):
    head, rest = before.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


def main(check):
    made = {
        HERE / "dashboards" / f"{spec['file']}.json": json.dumps(made_dashboard(spec), indent=1) + "\n"
        for spec in DASHBOARDS
    }
    made[HERE / "README.md"] = readme((HERE / "README.md").read_text())
    differs = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if check:
        for path in differs:
            print(f"{path.relative_to(HERE.parent)} is not what grafana/.make.py makes", file=sys.stderr)
        return 1 if differs else 0
    for path in differs:
        path.write_text(made[path])
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
