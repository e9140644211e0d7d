-- What the follower's broker takes as a volume of the copy's symbol, as its owner heard it: what a volume
-- is rounded to. Whoever compares rows with a master must not guess it. Rows of before do not have it.
alter table pairs
    add column lots_step numeric,
    add column lots_min  numeric;

-- Not valid: nothing of before has a value, and looking through all rows would hold up every writer.
alter table pairs
    add constraint pairs_volumes_positive check (lots_step > 0 and lots_min > 0) not valid,
    add constraint pairs_volumes_known_together check ((lots_step is null) = (lots_min is null)) not valid;
