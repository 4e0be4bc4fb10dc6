-- Lanes nobody claims from until they are resumed. What is live in them stays as it is.
CREATE TABLE outbox_pauses (
    lane      VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY,
    paused_at DATETIME(6) NOT NULL
) ENGINE = InnoDB;
