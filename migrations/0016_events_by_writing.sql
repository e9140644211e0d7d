-- Who follows the events, or counts those of the last day, looks for what was written since a moment.
-- Without an index each look reads a month. New rows are at its end: the writer touches one page of it.
create index copy_events_by_writing on copy_events (written_at);
