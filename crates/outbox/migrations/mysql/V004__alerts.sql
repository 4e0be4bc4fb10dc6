-- What has been alerted about, and since when; so that one trouble is one alert, whoever sees it and how often.
CREATE TABLE outbox_alerts (
    kind       VARCHAR(64)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    subject    VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    raised_at  DATETIME(6),
    suppressed BIGINT       NOT NULL DEFAULT 0,
    seen_until DATETIME(6),
    PRIMARY KEY (kind, subject)
) ENGINE = InnoDB;
