-- Repositories whose history is kept here, and what is known of it. Synchronising writes these tables and its watermark in
-- `kv (scm.sync/…)`; turning rows into memories reads them by a cursor of its own, `kv (gateway.consume/…)`.
CREATE TABLE scm_repos (
    repo_id      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    kind         VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL CHECK (kind IN ('git', 'svn', 'gitlab')),
    url          VARBINARY(512) NOT NULL,
    name         VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    target_space VARBINARY(190),
    created_at   DATETIME(6) NOT NULL,
    UNIQUE KEY uniq_scm_repos (kind, url)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE TABLE scm_git_commits (
    id           BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    repo_id      BIGINT NOT NULL,
    sha          VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    author       TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    authored_at  DATETIME(6) NOT NULL,
    committed_at DATETIME(6) NOT NULL,
    message      LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    parents      LONGTEXT NOT NULL,
    stats_json   LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    UNIQUE KEY uniq_scm_git_commits (repo_id, sha),
    KEY idx_scm_git_commits_order (repo_id, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE TABLE scm_svn_revisions (
    id         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    repo_id    BIGINT NOT NULL,
    revision   BIGINT NOT NULL,
    author     TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    at         DATETIME(6) NOT NULL,
    message    LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    paths_json LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    UNIQUE KEY uniq_scm_svn_revisions (repo_id, revision),
    KEY idx_scm_svn_revisions_order (repo_id, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE TABLE scm_merge_requests (
    id        BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    repo_id   BIGINT NOT NULL,
    iid       BIGINT NOT NULL,
    title     TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    state     VARCHAR(32) NOT NULL,
    author    TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    merged_at DATETIME(6),
    raw_json  LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    UNIQUE KEY uniq_scm_merge_requests (repo_id, iid),
    KEY idx_scm_merge_requests_order (repo_id, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- What a change looks like is not kept: where it is, and its digest. An empty uri is still to be materialised.
CREATE TABLE scm_patch_blobs (
    id          BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    source_type VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL CHECK (source_type IN ('git', 'svn', 'gitlab')),
    source_id   VARCHAR(128) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    uri         VARBINARY(1024) NOT NULL,
    sha256      VARCHAR(64),
    size        BIGINT,
    UNIQUE KEY uniq_scm_patch_blobs (source_type, source_id),
    KEY idx_scm_patch_blobs_open (uri(1), id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
