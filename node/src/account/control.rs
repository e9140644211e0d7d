//! What operators ask of a node: a plan, a comparison now, an account for another node.
//!
//! Does the I/O: hears requests on the bus, hands each to whoever answers for the account, and sends
//! the answer. It decides nothing.
//!
//! Invariants:
//! 1. Only the owner of an account answers for it; the others are silent.
//! 2. A request waits for nobody: where the owner is busy, it is refused with the reason or dropped,
//!    and whoever asked waits no longer than [`ANSWER_LIMIT`].

use super::session::NodeContext;
use crate::causes::with_causes;
use crate::follower::Preview;
use futures_util::StreamExt;
use reconcile::{CopyAction, CopyStep, Note};
use schemas::codec::{self, VERSION};
use schemas::control::{
    ControlReply, ControlRequest, LinkPlan, PLANNED_STEPS_MAX, PlannedStep, PlannedWait,
};
use schemas::{AccountId, FollowerTicket, Lots, Micros, Side, Symbol, subject};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// Requests that wait for the manager; more are dropped.
pub const ASKS_MAX: usize = 64;
/// How long an owner may take for its answer: a read of the account at its broker.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Pause before the bus is asked again.
const RETRY: Duration = Duration::from_secs(2);

/// What is done about a request.
pub(super) type Answer = Result<Vec<LinkPlan>, String>;

/// A request, and where its answer goes. Dropped unanswered it stays without a reply.
#[derive(Debug)]
pub struct Ask {
    pub(super) request: ControlRequest,
    answer: oneshot::Sender<Answer>,
}

impl Ask {
    pub(super) fn answer(self, answer: Answer) {
        // Who asked may be gone.
        let _unheard = self.answer.send(answer);
    }
}

/// Hears requests until the process ends.
pub async fn listen(context: Arc<NodeContext>, asks: mpsc::Sender<Ask>) {
    loop {
        match context.bus.subscribe(subject::control_accounts()).await {
            Ok(mut requests) => {
                let mut answering = JoinSet::new();
                while let Some(message) = requests.next().await {
                    while answering.try_join_next().is_some() {}
                    let asked = read(&message);
                    if let (Some(request), Some(reply), true) =
                        (asked, message.reply, answering.len() < ASKS_MAX)
                    {
                        answering.spawn(answer(Arc::clone(&context), asks.clone(), request, reply));
                    }
                }
            }
            Err(error) => {
                tracing::warn!(error = %with_causes(&error), "requests of operators are not heard")
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// A request that means the account of its subject, and wants its answer where answers go.
fn read(message: &async_nats::Message) -> Option<ControlRequest> {
    let account = subject::controlled(&message.subject)?;
    // Who wants no answer only tries out whether he may speak.
    message.reply.as_ref()?;
    let reply = message.reply.as_ref().filter(|reply| subject::is_control_reply(reply));
    let request = codec::decode_control_request(&message.payload);
    match (request, reply) {
        (Ok(request), Some(_)) if request.account == account => Some(request),
        (Ok(_), _) => {
            tracing::warn!(%account, "request of an operator for another account, or to nowhere");
            None
        }
        (Err(error), _) => {
            tracing::warn!(%account, error = %with_causes(&error), "request of an operator cannot be read");
            None
        }
    }
}

async fn answer(
    context: Arc<NodeContext>,
    asks: mpsc::Sender<Ask>,
    request: ControlRequest,
    reply: async_nats::Subject,
) {
    let account = request.account;
    let (sender, receiver) = oneshot::channel();
    if asks.try_send(Ask { request, answer: sender }).is_err() {
        return;
    }
    let Ok(Ok(answer)) = tokio::time::timeout(ANSWER_LIMIT, receiver).await else { return };
    let payload = codec::encode_control_reply(&replied(account, &context, answer));
    if let Err(error) = context.bus.publish(reply, payload.into()).await {
        tracing::warn!(%account, error = %with_causes(&error), "answer to an operator not sent");
    }
}

fn replied(account: AccountId, context: &NodeContext, answer: Answer) -> ControlReply {
    let (refused, plans) = match answer {
        Ok(plans) => (None, plans),
        Err(reason) => (Some(reason), Vec::new()),
    };
    ControlReply { v: VERSION, account, node: context.node.clone(), refused, plans }
}

/// Previews as they are answered, with no more steps than find room.
pub(super) fn told(previews: Vec<Preview>, at: Micros) -> Vec<LinkPlan> {
    let mut room = PLANNED_STEPS_MAX;
    previews.into_iter().map(|preview| link_plan(preview, at, &mut room)).collect()
}

fn link_plan(preview: Preview, at: Micros, room: &mut usize) -> LinkPlan {
    let empty = LinkPlan {
        link: preview.link,
        unknown: None,
        epoch: None,
        seq: None,
        at_us: at,
        held: false,
        steps: Vec::new(),
        left_out: 0,
        waiting: Vec::new(),
    };
    let plan = match preview.plan {
        Ok(plan) => plan,
        Err(reason) => return LinkPlan { unknown: Some(reason), ..empty },
    };
    let all: Vec<PlannedStep> = plan.actions.iter().flat_map(planned).collect();
    let told = all.len().min(*room);
    let waits: Vec<PlannedWait> = plan.notes.iter().filter_map(waiting).collect();
    *room -= told;
    let waits_told = waits.len().min(*room);
    *room -= waits_told;
    let left_out = all.len() - told + waits.len() - waits_told;
    LinkPlan {
        epoch: Some(plan.basis.epoch),
        seq: Some(plan.basis.seq),
        held: plan.held.is_some(),
        left_out: u32::try_from(left_out).unwrap_or(u32::MAX),
        steps: all.into_iter().take(told).collect(),
        waiting: waits.into_iter().take(waits_told).collect(),
        ..empty
    }
}

fn waiting(note: &Note) -> Option<PlannedWait> {
    match note {
        Note::Waiting { ticket, why } => {
            Some(PlannedWait { ticket: *ticket, why: why.as_str().to_owned() })
        }
        Note::ReportOrphan { .. } => None,
    }
}

fn planned(action: &CopyAction) -> impl Iterator<Item = PlannedStep> {
    action.steps.iter().map(|step| {
        let (symbol, side, lots) = traded(step);
        PlannedStep {
            ticket: action.master_ticket,
            step: step.as_str().to_owned(),
            copy: copy_of(step),
            symbol,
            side,
            lots,
            reason: step.reason().map(str::to_owned),
        }
    })
}

fn copy_of(step: &CopyStep) -> Option<FollowerTicket> {
    match step {
        CopyStep::AdoptCopy { ticket, .. }
        | CopyStep::CloseCopy { ticket, .. }
        | CopyStep::ReduceCopy { ticket, .. }
        | CopyStep::ModifyCopy { ticket, .. }
        | CopyStep::MarkClosed { ticket, .. }
        | CopyStep::CloseDuplicate { ticket, .. }
        | CopyStep::CloseOrphan { ticket, .. }
        | CopyStep::ModifyPending { ticket, .. }
        | CopyStep::CancelPending { ticket, .. }
        | CopyStep::RebindCopy { to: ticket, .. } => Some(*ticket),
        CopyStep::OpenCopy { .. }
        | CopyStep::MarkFailed { .. }
        | CopyStep::SkipOpen { .. }
        | CopyStep::PlacePending { .. } => None,
    }
}

fn traded(step: &CopyStep) -> (Option<Symbol>, Option<Side>, Option<Lots>) {
    match step {
        CopyStep::OpenCopy { symbol, side, lots, .. } => {
            (Some(symbol.clone()), Some(*side), Some(*lots))
        }
        CopyStep::PlacePending { symbol, kind, lots, .. } => {
            (Some(symbol.clone()), Some(kind.side()), Some(*lots))
        }
        CopyStep::AdoptCopy { symbol, side, .. }
        | CopyStep::MarkClosed { symbol, side, .. }
        | CopyStep::SkipOpen { symbol, side, .. } => (Some(symbol.clone()), Some(*side), None),
        CopyStep::ReduceCopy { lots, .. } => (None, None, Some(*lots)),
        CopyStep::RebindCopy { .. }
        | CopyStep::CloseCopy { .. }
        | CopyStep::ModifyCopy { .. }
        | CopyStep::MarkFailed { .. }
        | CopyStep::CloseDuplicate { .. }
        | CopyStep::CloseOrphan { .. }
        | CopyStep::ModifyPending { .. }
        | CopyStep::CancelPending { .. } => (None, None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemas::control::ControlVerb;

    fn message(subject: String, reply: Option<&str>, account: AccountId) -> async_nats::Message {
        let verb = ControlVerb::Release;
        let request = ControlRequest { v: VERSION, account, verb, link: None };
        async_nats::Message {
            subject: subject.into(),
            reply: reply.map(Into::into),
            payload: codec::encode_control_request(&request).into(),
            headers: None,
            status: None,
            description: None,
            length: 0,
        }
    }

    // Who may ask for one account may not ask for another by that, nor make a node speak where it
    // is believed.
    #[test]
    fn a_request_for_another_account_or_with_its_answer_to_elsewhere_is_not_heard() {
        let (one, other) = (AccountId::MIN, AccountId::MAX);
        let asked = subject::control_account(one);
        let answers = subject::control_reply("operator.1");
        let event = subject::event(one);
        for (message, is_heard) in [
            (message(asked.clone(), Some(&answers), one), true),
            (message(asked.clone(), Some(&answers), other), false),
            (message(asked.clone(), Some(&event), one), false),
            (message(asked, None, one), false),
            (message(event, Some(&answers), one), false),
        ] {
            let heard = read(&message).map(|request| request.account);
            assert_eq!(heard, is_heard.then_some(one), "{message:?}");
        }
    }
}
