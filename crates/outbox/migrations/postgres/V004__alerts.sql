-- What has been alerted about, and since when; so that one trouble is one alert, whoever sees it and how often.
CREATE TABLE outbox_alerts (
    kind       TEXT        NOT NULL,
    subject    TEXT        NOT NULL,
    raised_at  TIMESTAMPTZ,
    suppressed BIGINT      NOT NULL DEFAULT 0,
    seen_until TIMESTAMPTZ,
    PRIMARY KEY (kind, subject)
);
