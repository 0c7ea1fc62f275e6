-- Run after pgbench has filled and changed its tables.
\set ON_ERROR_STOP on
SELECT sum(abalance) = (SELECT sum(tbalance) FROM pgbench_tellers)
    AND sum(abalance) = (SELECT sum(bbalance) FROM pgbench_branches)
    AND sum(abalance) = (SELECT sum(delta) FROM pgbench_history) AS balanced FROM pgbench_accounts;
SELECT count(*), sum(delta) FROM pgbench_history;
CREATE TABLE item AS
    SELECT n AS id, md5(n::text) AS name, n * 31 % 1009 AS price, decode(repeat(md5(n::text), 50), 'hex') AS bytes
    FROM generate_series(1, 20000) n;
CREATE INDEX ON item (price);
CREATE INDEX ON item USING gin (to_tsvector('simple', name));
ANALYZE item;
SELECT a.price, count(*), max(b.name) FROM item a JOIN item b ON b.id = a.id * 3 GROUP BY a.price ORDER BY a.price LIMIT 20;
SELECT md5(string_agg(bytes, '' ORDER BY id)), sum(length(bytes)) FROM item;
SELECT id, rank() OVER (ORDER BY price DESC, id), percentile_cont(0.5) WITHIN GROUP (ORDER BY price)
    FROM item WHERE id < 15 GROUP BY id, price ORDER BY id;
SELECT id, name FROM item WHERE name ~ '^[0-9]{9}' ORDER BY id LIMIT 10;
SELECT jsonb_path_query_array('{"a": [1, 2, {"b": 3}]}', '$.a[*].b'), '[1,5)'::int4range * '[3,9]'::int4range;
SELECT n, n / 7.0::float8, sqrt(n), exp(n::numeric / 10) FROM generate_series(1, 10) n;
DO $$ DECLARE h bigint := 7; r record; BEGIN
    FOR r IN SELECT price FROM item ORDER BY id LOOP h := (h * 31 + r.price) % 1000003; END LOOP;
    RAISE NOTICE 'folded %', h;
    BEGIN PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN RAISE NOTICE 'caught %', SQLERRM; END;
END $$;
-- With processes of its own for parts of the query.
SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0;
SET max_parallel_workers_per_gather = 3;
SELECT count(*), sum(price), max(md5(bytes)) FROM item WHERE name LIKE '%7%';
BEGIN; DELETE FROM item WHERE id % 2 = 0; SELECT count(*) FROM item; ROLLBACK;
SELECT count(*) FROM item;
