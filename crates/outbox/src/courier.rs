//! Couriers carry one leased message to where it belongs and answer with an [`Outcome`].

use std::future::Future;

use async_trait::async_trait;

use crate::message::Message;
use crate::outcome::Outcome;

/// Delivers one message. It never retries by itself: that is what the outcome is for. No transaction is open meanwhile.
///
/// The future may be dropped before it ends (a drain that ran out of time); the message then counts as maybe sent.
#[async_trait]
pub trait Courier: Send + Sync + 'static {
    async fn deliver(&self, message: &Message) -> Outcome;
}

/// A courier from a closure.
///
/// ```
/// use postrider::{Outcome, courier};
/// let printer = courier(|message| async move {
///     println!("{}", String::from_utf8_lossy(&message.payload));
///     Outcome::sent()
/// });
/// ```
pub fn courier<F, Fut>(deliver: F) -> FnCourier<F>
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send,
{
    FnCourier(deliver)
}

/// See [`courier`].
pub struct FnCourier<F>(F);

#[async_trait]
impl<F, Fut> Courier for FnCourier<F>
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send,
{
    async fn deliver(&self, message: &Message) -> Outcome {
        (self.0)(message.clone()).await
    }
}
