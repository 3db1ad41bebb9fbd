"""What a journal's file is made of: the steps from an empty file to the present format."""

from inferscale_memory.journal.words import words_of

# From an empty file to the first format, and from each to the next.
STEPS = (
    """
CREATE TABLE turns (
    number  INTEGER PRIMARY KEY AUTOINCREMENT,
    scope   TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    session INTEGER NOT NULL,
    role    TEXT NOT NULL,
    speaker TEXT NOT NULL,
    text    TEXT,
    said_at TEXT,
    UNIQUE (scope, ordinal)
) STRICT;
CREATE INDEX turns_by_session ON turns (session);

CREATE TABLE facts (
    place    INTEGER PRIMARY KEY AUTOINCREMENT,
    fact     TEXT NOT NULL UNIQUE,
    owner    TEXT NOT NULL,
    scope    TEXT NOT NULL,
    tag      TEXT NOT NULL,
    text     TEXT NOT NULL,
    speaker  TEXT NOT NULL,
    said_at  TEXT,
    session  INTEGER,
    verbatim INTEGER NOT NULL
) STRICT;
CREATE INDEX facts_by_session ON facts (session);

CREATE TABLE sources (
    fact TEXT NOT NULL REFERENCES facts (fact) ON DELETE CASCADE,
    turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
    PRIMARY KEY (fact, turn)
) STRICT, WITHOUT ROWID;
CREATE INDEX sources_by_turn ON sources (turn);

CREATE TABLE ledger (
    fact        TEXT NOT NULL REFERENCES facts (fact) ON DELETE CASCADE,
    fingerprint TEXT NOT NULL,
    owner       TEXT NOT NULL,
    key         TEXT NOT NULL,
    tokens      INTEGER NOT NULL,
    line        TEXT NOT NULL,
    PRIMARY KEY (fact, fingerprint)
) STRICT, WITHOUT ROWID;
CREATE INDEX ledger_by_key ON ledger (key);

CREATE TABLE held (
    fact        TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    other       TEXT,
    turn        INTEGER,
    FOREIGN KEY (fact, fingerprint) REFERENCES ledger (fact, fingerprint) ON DELETE CASCADE
) STRICT;
CREATE INDEX held_by_blob ON held (fact, fingerprint);
CREATE INDEX held_by_fact ON held (other);
CREATE INDEX held_by_turn ON held (turn);

CREATE TABLE forgotten (
    fact TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID
""",
    """
ALTER TABLE facts ADD COLUMN expires TEXT;
CREATE INDEX facts_by_expiry ON facts (expires) WHERE expires IS NOT NULL;
CREATE INDEX turns_with_words ON turns (scope) WHERE text IS NOT NULL;

CREATE TABLE intents (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind   TEXT NOT NULL,
    fact   TEXT NOT NULL,
    scope  TEXT NOT NULL,
    words  TEXT NOT NULL,
    turns  TEXT NOT NULL
) STRICT
""",
    f"""
CREATE TABLE new_turns (
    number  INTEGER PRIMARY KEY AUTOINCREMENT,
    scope   TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    session INTEGER NOT NULL,
    role    TEXT NOT NULL,
    speaker TEXT NOT NULL,
    said_at TEXT,
    {words_of("text", "words")},
    UNIQUE (scope, ordinal)
) STRICT;
INSERT INTO new_turns (number, scope, ordinal, session, role, speaker, said_at, words)
    SELECT number, scope, ordinal, session, role, speaker, said_at, packed(text) FROM turns ORDER BY number;
DROP TABLE turns;
ALTER TABLE new_turns RENAME TO turns;
CREATE INDEX turns_by_session ON turns (session);
CREATE INDEX turns_with_words ON turns (scope) WHERE words IS NOT NULL;

CREATE TABLE new_facts (
    place    INTEGER PRIMARY KEY AUTOINCREMENT,
    fact     TEXT NOT NULL UNIQUE,
    owner    TEXT NOT NULL,
    scope    TEXT NOT NULL,
    tag      TEXT NOT NULL,
    speaker  TEXT NOT NULL,
    said_at  TEXT,
    session  INTEGER,
    verbatim INTEGER NOT NULL,
    expires  TEXT,
    {words_of("text", "words")} NOT NULL
) STRICT;
INSERT INTO new_facts (place, fact, owner, scope, tag, speaker, said_at, session, verbatim, expires, words)
    SELECT place, fact, owner, scope, tag, speaker, said_at, session, verbatim, expires, packed(text) FROM facts
    ORDER BY place;
DROP TABLE facts;
ALTER TABLE new_facts RENAME TO facts;
CREATE INDEX facts_by_session ON facts (session);
CREATE INDEX facts_by_expiry ON facts (expires) WHERE expires IS NOT NULL;

CREATE TABLE new_intents (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind   TEXT NOT NULL,
    fact   TEXT NOT NULL,
    scope  TEXT NOT NULL,
    turns  TEXT NOT NULL,
    facts  TEXT NOT NULL,
    {words_of("said", "words")} NOT NULL
) STRICT;
INSERT INTO new_intents (number, kind, fact, scope, turns, facts, words)
    SELECT number, kind, fact, scope, turns, '[]', packed(words) FROM intents ORDER BY number;
DROP TABLE intents;
ALTER TABLE new_intents RENAME TO intents;

CREATE TABLE IF NOT EXISTS failed_adds (number, scope, ids, options, error, attempts, failed_at);
CREATE TABLE new_failed_adds (
    number    INTEGER PRIMARY KEY AUTOINCREMENT,
    scope     TEXT NOT NULL,
    ids       TEXT NOT NULL,
    error     TEXT NOT NULL,
    attempts  INTEGER NOT NULL,
    failed_at TEXT NOT NULL,
    {words_of("options", "words")} NOT NULL
) STRICT;
INSERT INTO new_failed_adds (number, scope, ids, error, attempts, failed_at, words)
    SELECT number, scope, ids, error, attempts, failed_at, packed(options) FROM failed_adds;
DROP TRIGGER IF EXISTS failed_add_forgotten;
DROP TABLE failed_adds;
ALTER TABLE new_failed_adds RENAME TO failed_adds;

CREATE TABLE echoes (
    fact TEXT NOT NULL,
    turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
    PRIMARY KEY (fact, turn)
) STRICT, WITHOUT ROWID;
CREATE INDEX echoes_by_turn ON echoes (turn);

CREATE TABLE owed (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner  TEXT NOT NULL,
    keys   TEXT NOT NULL,
    tags   TEXT NOT NULL
) STRICT
""",
    """
ALTER TABLE ledger ADD COLUMN lost INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ledger ADD COLUMN chained INTEGER NOT NULL DEFAULT 0;

CREATE TABLE stands (
    fact        TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    base        TEXT NOT NULL,
    PRIMARY KEY (fact, fingerprint, base),
    FOREIGN KEY (fact, fingerprint) REFERENCES ledger (fact, fingerprint) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE INDEX stands_by_base ON stands (base);
CREATE INDEX facts_by_scope ON facts (scope, place)
""",
    """
UPDATE facts SET expires = expires || 'T23:59:59.999999+00:00' WHERE length(expires) = 10;

CREATE TABLE embedder (
    model TEXT NOT NULL
) STRICT
""",
)
FORMAT = len(STEPS)
