-- One client's session, for MariaDB and MySQL alike. Every result is determined by
-- the statements alone, so two runs of the same server print the same text.
DROP DATABASE IF EXISTS shop;
CREATE DATABASE shop;
USE shop;
CREATE TABLE customer (id INT PRIMARY KEY, name VARCHAR(60) NOT NULL, born DATE, credit DECIMAL(12,2),
    KEY (name)) ENGINE=InnoDB;
CREATE TABLE purchase (id INT AUTO_INCREMENT PRIMARY KEY, customer INT NOT NULL, price DECIMAL(10,2),
    note TEXT, KEY (customer), FOREIGN KEY (customer) REFERENCES customer (id)) ENGINE=InnoDB;
CREATE TABLE picture (id INT PRIMARY KEY, bytes LONGBLOB NOT NULL) ENGINE=InnoDB;
CREATE TABLE article (id INT PRIMARY KEY, body TEXT, FULLTEXT (body)) ENGINE=InnoDB;

CREATE TABLE digit (d INT PRIMARY KEY);
INSERT INTO digit VALUES (0),(1),(2),(3),(4),(5),(6),(7),(8),(9);
INSERT INTO customer
    SELECT n, CONCAT('customer ', LEFT(SHA2(n, 256), 32)), DATE_ADD('1950-01-01', INTERVAL n * 7 DAY), n * 13 % 997 + n / 100
    FROM (SELECT a.d + 10 * b.d + 100 * c.d AS n FROM digit a, digit b, digit c) numbers;
INSERT INTO purchase (customer, price, note)
    SELECT n * 17 % 1000, n * 31 % 1009 + 0.25, REPEAT(CHAR(97 + n % 26), n % 90)
    FROM (SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d AS n FROM digit a, digit b, digit c, digit e) numbers
    ORDER BY n;
INSERT INTO picture SELECT d, REPEAT(UNHEX(SHA2(d, 512)), 1 + d * 2000) FROM digit;
INSERT INTO article VALUES (1, 'large pages save translations'), (2, 'small pages cost translations'),
    (3, 'a page of a book is no page of memory');

SELECT COUNT(*), SUM(credit), MIN(born), MAX(born) FROM customer;
SELECT c.name, COUNT(*) AS purchases, SUM(p.price) AS total
    FROM customer c JOIN purchase p ON p.customer = c.id
    GROUP BY c.id, c.name HAVING total > 5000 ORDER BY total DESC, c.name LIMIT 25;
SELECT c.id, (SELECT MAX(price) FROM purchase p WHERE p.customer = c.id) AS dearest
    FROM customer c WHERE c.name LIKE '%a7%' ORDER BY c.id;
SELECT a.id, b.id FROM customer a LEFT JOIN customer b ON b.id = a.id * 37 AND b.credit > a.credit
    WHERE a.id < 40 ORDER BY a.id, b.id;
SELECT id, LENGTH(bytes), SHA2(bytes, 256), HEX(SUBSTRING(bytes, 60, 16)) FROM picture ORDER BY id;
SELECT bytes FROM picture WHERE id = 0;
SELECT id FROM article WHERE MATCH (body) AGAINST ('translations') ORDER BY id;
SELECT id, price, SUM(price) OVER (PARTITION BY customer ORDER BY id) AS running,
    ROW_NUMBER() OVER (ORDER BY price DESC, id) AS place
    FROM purchase WHERE customer IN (3, 30, 300) ORDER BY id;
WITH RECURSIVE chain (n, s) AS (SELECT 1, CAST('x' AS CHAR(200)) UNION ALL
    SELECT n + 1, CONCAT(s, n) FROM chain WHERE n < 60) SELECT MAX(n), SHA2(GROUP_CONCAT(s ORDER BY n), 256) FROM chain;
SELECT JSON_EXTRACT('{"a": [1, 2, {"b": "c"}]}', '$.a[2].b'), JSON_ARRAYAGG(d) FROM (SELECT d FROM digit ORDER BY d) x;
SELECT ST_AsText(ST_Envelope(ST_GeomFromText('LINESTRING(1 1, 2 5, 7 3)')));
SELECT name FROM customer WHERE name REGEXP '^customer [0-9]{6}' ORDER BY name LIMIT 10;
SELECT SHA2(GROUP_CONCAT(note ORDER BY note, id SEPARATOR ''), 256) FROM purchase WHERE id < 5000 GROUP BY customer % 7
    ORDER BY 1;
SELECT a.d * 1.5e0 / 7, POW(a.d, 3.25), LOG(1 + a.d), SIN(a.d) FROM digit a ORDER BY a.d;

START TRANSACTION;
UPDATE customer SET credit = credit * 2 WHERE id % 3 = 0;
SAVEPOINT half;
DELETE FROM purchase WHERE id % 2 = 0;
ROLLBACK TO SAVEPOINT half;
SELECT SUM(credit), (SELECT COUNT(*) FROM purchase) FROM customer;
ROLLBACK;
SELECT SUM(credit) FROM customer;

DELIMITER //
CREATE FUNCTION fold (text VARCHAR(200)) RETURNS INT DETERMINISTIC
BEGIN
    DECLARE i INT DEFAULT 1;
    DECLARE h INT DEFAULT 7;
    WHILE i <= CHAR_LENGTH(text) DO
        SET h = (h * 31 + ORD(SUBSTRING(text, i, 1))) % 65521;
        SET i = i + 1;
    END WHILE;
    RETURN h;
END //
CREATE TRIGGER dated BEFORE UPDATE ON customer FOR EACH ROW SET NEW.credit = NEW.credit + fold(NEW.name) //
DELIMITER ;
UPDATE customer SET name = CONCAT(name, '!') WHERE id < 200;
SELECT SUM(fold(name)), SUM(credit) FROM customer;
PREPARE dear FROM 'SELECT COUNT(*) FROM purchase WHERE price > ?';
SET @limit = 700;
EXECUTE dear USING @limit;
DEALLOCATE PREPARE dear;
ALTER TABLE purchase ADD COLUMN tax DECIMAL(10,4) AS (price * 0.19) STORED, ADD INDEX (tax);
SELECT SUM(tax), COUNT(DISTINCT tax) FROM purchase;
CHECKSUM TABLE customer, purchase, picture;
SELECT * FROM nowhere;
