//! The permit to delete what has ended, which guards in the database ask for. It holds within one transaction: who prunes
//! grants it to itself and withdraws it before the end.

use crate::error::Result;
use crate::tx::{Dialect, Tx};

/// Allows this transaction to delete what has ended. `what` is `requeue` or `prune`.
pub async fn permit(tx: &mut (dyn Tx + Send), what: &str) -> Result<()> {
    match tx.dialect() {
        Dialect::Sqlite => {
            tx.execute("INSERT OR IGNORE INTO postrider_permit VALUES (?)", &[what.into()]).await.map(drop)
        }
        Dialect::Postgres => tx.query("SELECT set_config('postrider.permit', ?, TRUE)", &[what.into()]).await.map(drop),
        Dialect::Mysql => tx.execute("SET @postrider_permit = ?", &[what.into()]).await.map(drop),
    }
}

pub async fn withdraw_permit(tx: &mut (dyn Tx + Send)) -> Result<()> {
    match tx.dialect() {
        Dialect::Sqlite => tx.execute("DELETE FROM postrider_permit", &[]).await.map(drop),
        Dialect::Postgres => tx.query("SELECT set_config('postrider.permit', '', TRUE)", &[]).await.map(drop),
        Dialect::Mysql => tx.execute("SET @postrider_permit = NULL", &[]).await.map(drop),
    }
}
