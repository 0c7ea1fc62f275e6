-- One of several clients at a time; @me is set before. Ends with a result that does
-- not depend on the order in which the clients got their turns.
USE shop;
SET @sql = CONCAT('CREATE TABLE own', @me, ' (id INT PRIMARY KEY, bytes BLOB) ENGINE=InnoDB');
PREPARE s FROM @sql; EXECUTE s;
SET @sql = CONCAT('INSERT INTO own', @me, ' SELECT id, UNHEX(SHA2(CONCAT(id, note, ', @me, '), 512)) FROM purchase');
PREPARE s FROM @sql; EXECUTE s;
SET @sql = CONCAT('SELECT COUNT(*), SUM(CRC32(bytes)) FROM own', @me);
PREPARE s FROM @sql; EXECUTE s;
SET @sql = CONCAT('SELECT COUNT(*), MAX(HEX(o.bytes)) FROM own', @me, ' o JOIN purchase p ON p.id = o.id',
    ' JOIN customer c ON c.id = p.customer WHERE c.credit > 300 AND o.bytes LIKE ''%', @me, '%''');
PREPARE s FROM @sql; EXECUTE s;
SET @sql = CONCAT('UPDATE own', @me, ' SET bytes = UNHEX(SHA2(bytes, 256)) WHERE id % 3 = 1');
PREPARE s FROM @sql; EXECUTE s;
SET @sql = CONCAT('SELECT SUM(CRC32(bytes)), COUNT(DISTINCT bytes) FROM own', @me);
PREPARE s FROM @sql; EXECUTE s;
SET @sql = CONCAT('DROP TABLE own', @me);
PREPARE s FROM @sql; EXECUTE s;
