-- Access tokens: only their digests are kept.
CREATE TABLE api_tokens (
    id         BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       TEXT        NOT NULL,
    token_sha  BYTEA       NOT NULL,
    scopes     TEXT        NOT NULL,
    lane       TEXT,
    created_at TIMESTAMPTZ NOT NULL,
    expires_at TIMESTAMPTZ,
    revoked_at TIMESTAMPTZ
);
