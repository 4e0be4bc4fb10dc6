//! The server's own tables, beside the kernel's: versions 101 to 199.

use postrider::Migration;

/// The server's own and those of the parts it serves.
pub fn migrations() -> Vec<Migration> {
    let parts = postrider_webhooks::MIGRATIONS.into_iter().chain(postrider_orders::MIGRATIONS);
    MIGRATIONS.into_iter().chain(parts).chain(postrider_memories::MIGRATIONS).collect()
}

const MIGRATIONS: [Migration; 4] =
    postrider::migrations![101 "V101__tokens", 102 "V102__workers", 103 "V103__sessions", 104 "V104__token_reach"];
