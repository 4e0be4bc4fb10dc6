//! The server's own tables, beside the kernel's: versions 101 to 199.

use postrider::Migration;

/// The server's own and those of the parts it serves.
pub fn migrations() -> Vec<Migration> {
    let parts = postrider_webhooks::MIGRATIONS.into_iter().chain(postrider_orders::MIGRATIONS);
    MIGRATIONS.into_iter().chain(parts).chain(postrider_memories::MIGRATIONS).collect()
}

const MIGRATIONS: [Migration; 2] = [
    Migration {
        version: 101,
        name: "V101__tokens",
        sqlite: include_str!("../migrations/sqlite/V101__tokens.sql"),
        postgres: include_str!("../migrations/postgres/V101__tokens.sql"),
        mysql: include_str!("../migrations/mysql/V101__tokens.sql"),
    },
    Migration {
        version: 102,
        name: "V102__workers",
        sqlite: include_str!("../migrations/sqlite/V102__workers.sql"),
        postgres: include_str!("../migrations/postgres/V102__workers.sql"),
        mysql: include_str!("../migrations/mysql/V102__workers.sql"),
    },
];
