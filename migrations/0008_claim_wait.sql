-- How long after the end of its lease an account is left alone, in terms of that lease: half of one
-- after the second tenure that ended early, doubling up to fifteen. The same as `claim_wait` of the
-- node, which a test compares. The function without a lease is for nodes of before.
create function lockstep_claim_wait(starts integer, account bigint, lease interval) returns interval
language sql immutable parallel safe as $$
    select case when starts < 2 then interval '0'
        else least(lease / 2 * power(2, least(starts - 2, 10)), lease * 15)
             * (500 + account % 1000003 * 7919 % 1000) / 1000
    end
$$;
