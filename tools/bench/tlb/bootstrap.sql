create database d;
use d;
create table t (id int primary key, k int, v varchar(60), key (k)) engine=innodb;
insert into t select seq, seq*7919 mod 1000, repeat('x', seq mod 50) from seq_1_to_4000;
select count(*), sum(k), max(length(v)) from t where k < 500;
select a.k, count(*) from t a join t b on a.k=b.k where a.id < 500 group by a.k order by 2 desc, 1 limit 5;
update t set v = concat(v, 'y') where k between 100 and 300;
select sha2(group_concat(v order by id), 256) from t where k < 200;
