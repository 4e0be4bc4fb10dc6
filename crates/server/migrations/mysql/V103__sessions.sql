-- Browsers that signed in: of a session only its digest is kept. It stands for its token and ends with it.
CREATE TABLE postrider_sessions (
    id          BIGINT      NOT NULL AUTO_INCREMENT PRIMARY KEY,
    session_sha BINARY(32)  NOT NULL UNIQUE,
    token_id    BIGINT      NOT NULL,
    created_at  DATETIME(6) NOT NULL,
    expires_at  DATETIME(6) NOT NULL,
    INDEX postrider_sessions_token (token_id),
    INDEX postrider_sessions_end (expires_at)
) ENGINE = InnoDB;
