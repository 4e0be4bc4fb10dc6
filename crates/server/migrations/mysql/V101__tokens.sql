-- Access tokens: only their digests are kept.
CREATE TABLE api_tokens (
    id         BIGINT        NOT NULL AUTO_INCREMENT PRIMARY KEY,
    name       VARCHAR(255)  NOT NULL,
    token_sha  BINARY(32)    NOT NULL,
    scopes     VARCHAR(255)  NOT NULL,
    lane       VARCHAR(64)   CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    created_at DATETIME(6)   NOT NULL,
    expires_at DATETIME(6),
    revoked_at DATETIME(6)
) ENGINE = InnoDB;
