-- Whether a follower's broker gives back what our orders carry (H53).
--
-- Set by the follower's owner, under its lease token, when a copy came back without its tag or
-- its magic: from then on no owner opens late on this link or adopts a copy that has no row.
-- Switching the link on again clears it, and the next copy is looked at anew.
alter table copy_links add column untaggable_since timestamptz;
